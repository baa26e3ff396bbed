"""Comparison of pretext tasks, each trained for the same time on the same images."""
