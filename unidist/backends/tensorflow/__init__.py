"""The `tensorflow` backend: one DTensor holds the shards of all ranks, moved by cached DTensor programs."""
