"""Where else a run tells what it does: trackers of experiments, each behind lightning-fabric's ``Logger``."""
