"""Tensor parallelism on torch: what layers with cut weights do, and which of them are proven to work in pairs."""
