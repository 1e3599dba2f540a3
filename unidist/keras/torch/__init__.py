"""Keras on torch: each rank holds its shards, and unidist moves what is needed.

A model is placed (`values`), its layers get rules (`tensor_parallel`), and Keras's trainer runs unchanged inside a
rank's frame (context.py, engine.py). In it losses know their global denominators, metrics merge, batch statistics are
global and gradients go through buckets (`steps`). What may look at several rows sees those of all shards (`rows`).
"""
