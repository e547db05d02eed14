"""fsbench: a reproducible benchmark harness for entropic optimal transport."""

__version__ = "0.1.0"
