"""Hold the version of the package, for its build and for records."""

__version__ = "0.2.0"
