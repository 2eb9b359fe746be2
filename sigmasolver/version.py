"""The version of the package, written once."""

__version__ = "0.3.0.dev0"
