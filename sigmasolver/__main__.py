"""`python -m sigmasolver` is the command `sigmasolver`."""

from sigmasolver.interrupts import Interrupts

__all__ = ["main"]


def main() -> None:
    """Run the command; Ctrl-C is heard while its modules are still being imported."""
    with Interrupts():
        from sigmasolver.cli import main as command

        command()


if __name__ == "__main__":
    main()
