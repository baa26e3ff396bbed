"""Pre-training: settings, the loop, and what a run leaves behind."""
