"""Rows on torch: what may look at several rows of a batch is called with the rows of all shards in view."""
