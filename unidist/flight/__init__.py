"""What a process is at, kept where others can read it after its end: its phase, its steps, its last collectives."""
