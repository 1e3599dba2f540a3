"""Values on torch: stores variables, moves their shards in buffers, and shows them to files."""
