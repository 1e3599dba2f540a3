"""Keras on TensorFlow: variables are DTensors, a step is one tf.function that DTensor partitions."""
