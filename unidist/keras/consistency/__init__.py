"""Compares what processes are about to do, and lets them decide together."""
