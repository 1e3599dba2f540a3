"""Stands before TensorFlow on the path of most tests: Keras imports it wherever it finds it, for seconds each time."""

raise ImportError("these tests run without TensorFlow; those of tf.data take this folder from the path")
