"""The process itself: Ctrl-C and SIGTERM, several processes as one, threads."""
