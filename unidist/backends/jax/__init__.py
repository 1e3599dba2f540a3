"""The `jax` backend: global arrays with a NamedSharding, moved by cached shard_map programs."""
