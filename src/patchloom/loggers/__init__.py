"""Where else a run tells what it does: trackers of experiments, each behind lightning-fabric's ``Logger``."""

# the class of each, in the module of its name; that is the name of the package that it needs, too
TRACKERS = {"tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow", "trackio": "Trackio"}
