"""DataParallel and ModelParallel: the strategies that Keras sees as its distributions."""
