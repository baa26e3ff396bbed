"""Runs on disc: settings, folder, checkpoints, task, held-out split and record of the training images."""
