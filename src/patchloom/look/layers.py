"""A curve over the layers of an encoder: what each knows of the classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from patchloom.look.curves import INK, QUIET, RUN, RUN_PALE, STYLE, Panel, frame_panel, name_lines, write_figure

HEIGHT, WIDTH, WIDER = 3.4, 3.4, 0.22  # inches: of the picture, and of its width for each layer


def draw_layers(
    layers: Sequence[str],
    values: Sequence[tuple[float, float, float]],
    untrained: Sequence[float],
    baselines: dict[str, float],
    best: int,
    name: str,
    note: str,
    out: Path,
) -> Path:
    """Draw an encoder's accuracy in each of its layers as a PNG file, beside an untrained one's.

    Args:
        layers: their names, from what enters the first block to the last norm.
        values: of each layer, accuracy and its interval, as shares.
        untrained: the untrained encoder's.
        baselines: what has no layers, by name.
        best: number of the layer that is marked as the chosen one.
        name: of the encoder.
        note: what was measured.
        out: the picture; its folder is made if it is missing.

    Returns:
        ``out``.

    Raises:
        PatchloomError: the file cannot be written.
    """
    places = np.arange(len(layers))
    shares, low, high = np.array(values).T
    panel = Panel(f"Layers of {name}", note, places, shares, baselines, True, 0)
    with matplotlib.rc_context(STYLE):
        figure = Figure((WIDTH + WIDER * len(layers), HEIGHT), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
        axes = figure.subplots()
        frame_panel(axes, panel)
        axes.fill_between(places, low, high, color=RUN_PALE, alpha=0.4, linewidth=0)
        axes.plot(places, untrained, color=QUIET, linewidth=1.4, marker="o", markersize=2.5)
        axes.plot(places, shares, color=RUN, linewidth=1.9, marker="o", markersize=3.5)
        axes.plot(places[best], shares[best], "o", markersize=8, markerfacecolor="none", color=INK)
        chosen = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 8, "color": INK}
        away = 12 if shares[best] >= untrained[best] else -12  # from the other curve
        axes.annotate("chosen", (places[best], shares[best]), (0, away), **chosen)
        axes.margins(x=0.02)
        axes.set_xticks(places, ["0", *(layer.removeprefix("block ") for layer in layers[1:])])
        axes.set_xlabel("after block")
        dashed = {"untrained": untrained[-1], **baselines}  # its curve is named as the dashed lines are
        name_lines(axes, panel._replace(baselines=dashed), float(shares[-1]), "this encoder")
        return write_figure(figure, out)
