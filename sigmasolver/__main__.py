"""`python -m sigmasolver` is the command `sigmasolver`."""

from sigmasolver.runtime.interrupts import Interrupts
from sigmasolver.runtime.threads import choose_threads

__all__ = ["main"]


def main() -> None:
    """Run the command line; Ctrl-C is handled during its imports too."""
    choose_threads()
    with Interrupts():
        from sigmasolver.cli import main as command

        command()


if __name__ == "__main__":
    main()
