"""Recordings: decoding, excerpts of one length, and pictures of the spectrum."""
