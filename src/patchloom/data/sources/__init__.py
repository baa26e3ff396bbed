"""Kinds of sources, one file each; `open` chooses one by what the user typed."""
