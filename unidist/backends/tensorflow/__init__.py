"""The `tensorflow` backend: one DTensor holds all ranks' shards, moved by cached DTensor programs."""
