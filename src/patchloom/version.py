"""The version of this package, apart from everything else: it is also part of file names and of digests."""

__version__ = "0.1.0"
