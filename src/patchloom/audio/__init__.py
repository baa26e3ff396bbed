"""Recordings: how they are read, cut to one length, and made into pictures of their spectrum."""
