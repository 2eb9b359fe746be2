"""`python -m sigmasolver` is the command `sigmasolver`."""

from sigmasolver.cli import main

main()
