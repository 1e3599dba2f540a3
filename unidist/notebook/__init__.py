"""Runs a function of a notebook in processes, which a kernel cannot be: `unidist.notebook_run`."""

from unidist.notebook.running import notebook_run as notebook_run
