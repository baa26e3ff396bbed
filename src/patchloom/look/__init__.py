"""Pictures for people: what was withheld and what came back, and how a run went."""

from patchloom.look.curves import draw_curves
from patchloom.look.sheets import draw_sheet

__all__ = ["draw_curves", "draw_sheet"]
