"""Mixtures of small tasks."""

from small import small

from patchloom.tasks import build_task


def make(positions=None, **options):
    """Build a mixture with ``options`` around an encoder with ``positions``, by default the matching ones."""
    withhold = options.get("withhold")
    all_of_them = isinstance(withhold, dict) and withhold.get("drop_positions") == 1
    positions = positions or ("none" if all_of_them else "sincos")
    task = small(
        lambda encoder, **asked: build_task({"name": "mixture", **asked}, encoder), positions=positions, **options
    )
    channels = task.geometry.channels
    task.normalized_by((0.4,) * channels, (0.25,) * channels)
    return task
