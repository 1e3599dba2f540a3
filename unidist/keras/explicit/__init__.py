"""The explicit engine: Keras on torch, where each rank holds its shards and unidist moves what is needed.

A model is placed (variables.py, placing.py), its layers get rules (rules.py, pairs.py), its gradients go through
buckets (reducer.py, buckets.py), and Keras's trainer runs unchanged inside a rank's frame (context.py, engine.py), in
which losses know their global denominators (losses.py), metrics merge (metrics.py) and batch statistics are global
(statistics.py).
"""
