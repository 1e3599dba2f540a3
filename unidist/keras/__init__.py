"""The Keras layer. This package file imports nothing: Keras comes only with what is asked of it."""
