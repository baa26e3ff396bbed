"""Pictures for people: what was withheld and what came back, and how a run went."""

from patchloom.look.curves import draw_curves
from patchloom.look.layers import draw_layers
from patchloom.look.position_map import Example, draw_position_map
from patchloom.look.sheets import draw_sheet

__all__ = ["Example", "draw_curves", "draw_layers", "draw_position_map", "draw_sheet"]
