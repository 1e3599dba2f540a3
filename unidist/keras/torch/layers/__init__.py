"""Tensor parallelism on torch: what layers with cut weights do, and parts of sequences between them."""
