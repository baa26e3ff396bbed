"""Resolved settings of a small run."""

from typing import Any

from patchloom.runs.settings import ResolvedSettings, Settings

VALUES: dict[str, Any] = {
    **{"img_size": (16, 16), "patch_size": 4, "positions": "sincos", "channels": 3, "epochs": 3, "batch_size": 8},
    **{"blr": 1e-3, "weight_decay": 0.05, "warmup_epochs": 0.3, "crop_scale": 0.2, "held_out": 0.05, "workers": 0},
    **{"device": "cpu", "devices": 1, "precision": "float32", "attention": "fused", "kernels": "torch"},
    **{"compile": False, "threads": 1, "cache": "none", "layer_decay": 1.0, "normalization": "data"},
    **{"adapt": "all", "heads_first": 0.0},
}


def resolved_settings(data: str = "photos/", **given: Any) -> ResolvedSettings:
    """Return the settings of a run of MAE on a nano encoder, with overrides."""
    return Settings(data, {"name": "mae"}, {"name": "nano"}).resolved(**VALUES | given)
