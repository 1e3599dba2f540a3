"""Stands before scikit-learn on the path of most tests: Keras imports it wherever it finds it, for a second."""

raise ImportError("these tests run without scikit-learn; those of the demo take this folder from the path")
