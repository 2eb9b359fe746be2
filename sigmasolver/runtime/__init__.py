"""Process-level concerns: signals, distributed processes, threads."""
