"""TensorFlow's graphs are run as they were traced: a test runs each a few times only.

Grappler, which makes graphs faster, takes a fifth of the time of a test that traces one.

Imported by what tests preload.
"""

from __future__ import annotations

import tensorflow as tf

tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
