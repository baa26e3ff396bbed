"""Kinds of sources, one file each; `open` chooses between them by what the user typed."""
