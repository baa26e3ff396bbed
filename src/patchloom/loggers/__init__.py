"""Experiment trackers behind lightning-fabric's ``Logger``."""

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")  # each is named after the package that it needs
