"""Pictures for people: what was withheld and what came back, what an encoder sees, and how a run went."""

from patchloom.look.curves import draw_curves
from patchloom.look.encoder.asked import NamedEncoder
from patchloom.look.encoder.attention import attention_maps, class_attention, rollout
from patchloom.look.encoder.components import components
from patchloom.look.encoder.correlation import correlation, position_correlation
from patchloom.look.encoder.depth import linear_cka, measure_depth, relative_log_amplitude
from patchloom.look.encoder.invert import invert
from patchloom.look.encoder.relative import relative_attention
from patchloom.look.encoder.retrieval import locality_retrieval
from patchloom.look.layers import draw_layers
from patchloom.look.position_map import Example, draw_position_map
from patchloom.look.sheets import draw_sheet

__all__ = [
    "Example",
    "NamedEncoder",
    "draw_curves",
    "draw_layers",
    "draw_position_map",
    "draw_sheet",
    "attention_maps",
    "class_attention",
    "components",
    "correlation",
    "invert",
    "linear_cka",
    "locality_retrieval",
    "measure_depth",
    "position_correlation",
    "relative_attention",
    "relative_log_amplitude",
    "rollout",
]
