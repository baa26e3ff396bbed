"""Pre-training: resolved settings, the training loop, and the results of a run."""
