"""The `torch` backend: torch.distributed, one process a device."""
