"""The `horovod` backend: Horovod over torch or over TensorFlow, one process a device."""
