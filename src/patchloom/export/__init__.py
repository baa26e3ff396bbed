"""``export``: an encoder for use without patchloom, in the forms of other libraries, each of which is loaded back."""

from patchloom.export.exported import Export
from patchloom.export.verb import export

__all__ = ["Export", "export"]
