"""Pictures for people: what was withheld and what came back, and how a run went."""

from patchloom.look.curves import draw_curves
from patchloom.look.layers import draw_layers
from patchloom.look.maps import Map, draw_maps
from patchloom.look.sheets import draw_sheet

__all__ = ["Map", "draw_curves", "draw_layers", "draw_maps", "draw_sheet"]
