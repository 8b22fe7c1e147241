"""The version of this package, which runs and their checks name."""

__version__ = "0.1.0"
