"""`python -m sigmasolver` is the command `sigmasolver`."""

from sigmasolver.runtime.interrupts import Interrupts
from sigmasolver.runtime.threads import choose_threads

__all__ = ["main"]


def main() -> None:
    """Run the command; Ctrl-C is heard while its modules are still being imported."""
    choose_threads()
    with Interrupts():
        from sigmasolver.cli import main as command

        command()


if __name__ == "__main__":
    main()
