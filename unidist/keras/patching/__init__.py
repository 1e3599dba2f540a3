"""Replaces attributes of Keras: one table, the versions it was read in, and the way back."""
