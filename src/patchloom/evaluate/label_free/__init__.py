"""Measures of an encoder that need no labels, one file each, and `label_free_rows`, all of them of one encoder.

What they are worth was measured: `benchmarks/label_free.py` compares them with the ranking by labels.
"""

from patchloom.evaluate.label_free.crops import own_crop_found
from patchloom.evaluate.label_free.kept import neighbours_kept
from patchloom.evaluate.label_free.lidar import lidar
from patchloom.evaluate.label_free.rows import label_free_rows
from patchloom.evaluate.label_free.spectrum import alpha_req, rankme

__all__ = ["alpha_req", "label_free_rows", "lidar", "neighbours_kept", "own_crop_found", "rankme"]
