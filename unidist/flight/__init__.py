"""Keeps what a process is at where others read it after its end: phase, steps, last collectives."""
