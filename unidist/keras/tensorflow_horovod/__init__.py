"""Keras on TensorFlow over Horovod. Every process holds the whole model; data parallel only.

Every process reads each whole batch. The model's outermost call computes this process's rows of it and gathers the
outputs of all (engine.py): losses, masks, weights and metrics are those of the whole batch, by Keras's own code.
Gradients are reduced before the optimizer sees them. Keras's step stays one tf.function; collectives enter it as calls
of Python (traced.py).
"""
