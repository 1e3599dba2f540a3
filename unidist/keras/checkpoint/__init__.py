"""A Keras model's way into checkpoints and out of them, and trainings that go on where they stood."""
