"""TensorFlow's graphs are run as they were traced: a test runs each a few times only.

Grappler, which makes graphs faster, takes a fifth of the time of a test that traces one. Where in Python an operation
was made, hundreds of frames deep, is for people who read an error: one stack serves all operations of a process.

Imported by what tests preload. (`tf_stack.extract_stack`, read in TensorFlow 2.21.)
"""

from __future__ import annotations

from functools import cache

import tensorflow as tf
from tensorflow.python.util import tf_stack

tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
tf_stack.extract_stack = cache(tf_stack.extract_stack)
