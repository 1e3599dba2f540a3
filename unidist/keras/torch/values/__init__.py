"""Values on torch: where variables are stored, the buffers that shards move in, and how files see them."""
