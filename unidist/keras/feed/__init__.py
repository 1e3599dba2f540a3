"""Shares a fit's data out: which rows of a batch are this process's."""
