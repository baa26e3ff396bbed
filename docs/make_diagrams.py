"""Write the diagrams of explanation/tasks.md as SVG files; a test fails if they are out of date.

python docs/make_diagrams.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "_pictures"
SIDE, STEP = 24, 27  # pixels of a patch, and from one patch to the next
TOP, BOTTOM = 30, 12
INK, GREY, PALE, ASKED = "#24292f", "#8c959f", "#eaeef2", "#bf4b00"

# a house under the sun in 6x6 patches; most tasks show its centre of 4x4
SCENE = ("ssssss", "sssyss", "ssrrss", "gswwst", "ggwdgt", "ggggpp")
COLOURS = {
    **{"s": "#9fcdf5", "y": "#f7d154", "r": "#c2543d", "w": "#ead9b8", "d": "#7a5230"},
    **{"g": "#86b86b", "t": "#3f7d4a", "p": "#b9b3a5"},
}
Place = tuple[int, int]
INNER = [(row, column) for row in range(4) for column in range(4)]


def colour_of(place: Place, corner: Place = (1, 1)) -> str:
    """Return the colour of a patch of the part of the scene that begins at ``corner``."""
    return COLOURS[SCENE[place[0] + corner[0]][place[1] + corner[1]]]


class Drawing:
    """SVG picture that is built from left to right, panel by panel."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.x = 14.0
        self.height = 0.0

    def square(
        self, x: float, y: float, fill: str, stroke: str = "none", dash: bool = False, side: float = SIDE
    ) -> None:
        """Draw one patch."""
        line = f' stroke="{stroke}" stroke-width="2"' if stroke != "none" else ""
        line += ' stroke-dasharray="4 3"' if dash else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{side:g}" height="{side:g}" rx="3" fill="{fill}"{line}/>')

    def text(self, x: float, y: float, words: str, size: int = 12, colour: str = INK, anchor: str = "middle") -> None:
        """Write words around (x, y)."""
        style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
        style += ' font-weight="bold"' if words in ("?", "M") else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>')

    def patch(self, x: float, y: float, kind: str, colour: str) -> None:
        """Draw a patch: seen, withheld, a mask token, asked for, an asked place, or asked features."""
        middle = x + SIDE / 2
        if kind == "seen":
            self.square(x, y, colour)
        elif kind == "withheld":
            self.square(x + 1, y + 1, PALE, "#d0d7de", side=SIDE - 2)
        elif kind == "token":
            self.square(x, y, GREY)
            self.text(middle, y + 17, "M", 13, "white")
        elif kind == "pixels":
            self.square(x + 1, y + 1, colour, ASKED, side=SIDE - 2)
        elif kind == "place":
            self.square(x + 1, y + 1, "white", ASKED, dash=True, side=SIDE - 2)
            self.text(middle, y + 17, "?", 14, ASKED)
        elif kind == "features":
            self.square(x + 1, y + 1, "white", ASKED, side=SIDE - 2)
            for i, tall in enumerate((10, 5, 13)):
                self.parts.append(
                    f'<rect x="{x + 6 + 5 * i:g}" y="{y + 19 - tall:g}" width="3" height="{tall}" fill="{ASKED}"/>'
                )

    def grid(
        self, title: str, kinds: dict[Place, str], side: int = 4, default: str = "withheld", corner: Place | None = None
    ) -> None:
        """Draw a grid of patches beneath its title; patches without a kind have the default one."""
        width = side * STEP - (STEP - SIDE)
        corner = corner or ((len(SCENE) - side) // 2,) * 2
        self.text(self.x + width / 2, TOP - 12, title)
        for place in ((row, column) for row in range(side) for column in range(side)):
            x, y = self.x + place[1] * STEP, TOP + place[0] * STEP
            self.patch(x, y, kinds.get(place, default), colour_of(place, corner))
        self.x += width
        self.height = max(self.height, TOP + side * STEP)

    def loose(self, title: str, places: Sequence[Place], marked: Iterable[Place] = (), columns: int = 4) -> None:
        """Draw patches without a place, slightly turned; the marked ones have a dark border."""
        gap = STEP + 5
        width = columns * gap - (gap - SIDE)
        self.text(self.x + width / 2, TOP - 12, title)
        for i, place in enumerate(places):
            x, y = self.x + i % columns * gap, TOP + 2 + i // columns * gap
            turn = (-9, 7, -5, 10, 6, -8)[i % 6]
            self.parts.append(f'<g transform="rotate({turn} {x + SIDE / 2:g} {y + SIDE / 2:g})">')
            self.square(x, y, colour_of(place), INK if place in marked else "none")
            self.parts.append("</g>")
        self.x += width
        self.height = max(self.height, TOP + 2 + -(-len(places) // columns) * gap)

    def pair(self, title: str, first: Place, second: Place) -> None:
        """Draw two patches and the translation between them, which is asked for, beneath a title."""
        width = 5 * STEP
        self.text(self.x + width / 2, TOP - 12, title)
        ends = (self.x + 8, TOP + 4.0), (self.x + width - STEP - 6, TOP + 2.4 * STEP)
        for (x, y), place in zip(ends, (first, second), strict=True):
            self.square(x, y, colour_of(place), INK)
        (x1, y1), (x2, y2) = ((x + SIDE / 2, y + SIDE / 2) for x, y in ends)
        self.parts.append(
            f'<line x1="{x1 + 16:g}" y1="{y1 + 10:g}" x2="{x2 - 16:g}" y2="{y2 - 10:g}" stroke="{ASKED}" '
            'stroke-width="3" stroke-dasharray="5 3"/>'
        )
        self.x += width
        self.height = max(self.height, TOP + 4 * STEP)

    def vector(self, title: str, y: float = TOP + 2 * STEP) -> None:
        """Draw a vector that is asked for, beside its title."""
        for i, tall in enumerate((16, 30, 9, 24, 13, 34, 20)):
            self.parts.append(
                f'<rect x="{self.x + 9 * i:g}" y="{y + 17 - tall:g}" width="6" height="{tall}" fill="{ASKED}"/>'
            )
        self.text(self.x, y + 36, title, anchor="start")
        self.x += max(63, 6.2 * len(title))

    def arrow(self, side: int = 4) -> None:
        """Draw an arrow to the next panel, at half the height of a grid."""
        y = TOP + (side * STEP - 3) / 2
        self.x += 14
        path = f"M{self.x:g} {y:g} h26 m-7 -6 l7 6 l-7 6"
        self.parts.append(f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="2"/>')
        self.x += 40

    def svg(self, about: str) -> str:
        """Return the file."""
        width, height = self.x + 14, self.height + BOTTOM
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        head += f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" role="img">'
        card = f'<rect width="{width:.0f}" height="{height:.0f}" rx="6" fill="white"/>'
        return "\n".join([head, f"<title>{about}</title>", card, *self.parts, "</svg>", ""])


def all_of(places: Iterable[Place], kind: str) -> dict[Place, str]:
    """Return the same kind for each place."""
    return dict.fromkeys(places, kind)


FEW = [(0, 2), (1, 1), (2, 3), (3, 0)]  # a quarter of the patches
TOKENS = [(0, 0), (0, 3), (1, 0), (1, 2), (2, 1), (2, 2), (3, 1), (3, 3), (1, 3), (3, 2)]
MIXED = [(3, 2), (0, 1), (2, 2), (1, 1), (0, 3), (3, 0), (1, 3), (2, 0), (0, 2), (2, 3), (1, 0), (3, 3), (0, 0), (1, 2)]
MIXED += [(2, 1), (3, 1)]
BLOCKS = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 2), (2, 3), (3, 2), (3, 3)]  # several blocks
CONTEXT = [(0, 2), (0, 3), (2, 0), (3, 1)]
OTHERS = [place for place in INNER if place not in FEW]


def start() -> Drawing:
    """Return a drawing that begins with the image."""
    drawing = Drawing()
    drawing.grid("image", {}, default="seen")
    drawing.arrow()
    return drawing


def mae() -> Drawing:
    one = start()
    one.grid("encoder sees", all_of(FEW, "seen"))
    one.arrow()
    one.grid("asked: pixels", all_of(OTHERS, "pixels"))
    return one


def crossmae() -> Drawing:
    one = start()
    one.grid("encoder sees", all_of(FEW, "seen"))
    one.arrow()
    one.grid("asked: pixels", all_of(OTHERS[::3], "pixels"))
    return one


def simmim() -> Drawing:
    one = start()
    one.grid("encoder sees", all_of(TOKENS, "token"), default="seen")
    one.arrow()
    one.grid("asked: pixels", all_of(TOKENS, "pixels"))
    return one


def droppos() -> Drawing:
    one = start()
    one.grid("encoder sees", all_of(FEW[:1], "seen"))
    one.x += 34
    one.loose("without place", FEW[1:], columns=1)
    one.x += 14
    one.arrow()
    one.grid("asked: their places", all_of(FEW[1:], "place"))
    return one


def mp3() -> Drawing:
    one = start()
    one.loose("encoder sees", MIXED, MIXED[::2])
    one.arrow()
    one.grid("asked: all places", {}, default="place")
    return one


def restore() -> Drawing:
    one = Drawing()
    one.grid("canvas", {}, 6, "seen")
    one.arrow(6)
    seen = [(row + 1, column + 1) for row, column in FEW]
    x, y = one.x + STEP - 3, TOP + STEP - 3
    one.grid("encoder sees", all_of(seen, "seen"), 6)
    one.parts.append(
        f'<rect x="{x:g}" y="{y}" width="{4 * STEP + 3}" height="{4 * STEP + 3}" fill="none" stroke="{INK}"/>'
    )
    one.arrow(6)
    asked = [(row, column) for row in range(6) for column in range(6) if (row, column) not in seen]
    one.grid("asked: pixels", all_of(asked, "pixels"), 6)
    return one


def extrema() -> Drawing:
    one = start()
    one.grid("student: mask 1", all_of([(0, 2), (2, 1), (3, 3)], "seen"))
    one.x += 18
    one.grid("… mask 5", all_of([(1, 1), (1, 3), (3, 0)], "seen"))
    one.arrow()
    one.vector("asked: teacher's vector of the whole")
    return one


def lut() -> Drawing:
    one = Drawing()
    one.grid("image", {}, 6, "seen")
    one.arrow(6)
    one.grid("crop 1", all_of(FEW, "seen"), corner=(0, 1))
    one.x += 18
    one.grid("crop 2", all_of([(0, 0), (1, 3), (2, 1), (3, 2)], "seen"), corner=(2, 2))
    one.arrow(6)
    one.grid("asked: pixels", all_of(OTHERS, "pixels"), corner=(0, 1))
    one.x += 20
    one.vector("and the teacher's vector of crop 2")
    return one


def distill() -> Drawing:
    one = start()
    one.grid("encoder sees", all_of(TOKENS[:6], "token"), default="seen")
    one.arrow()
    one.grid("asked: features", all_of(TOKENS[:6], "features"))
    return one


def latent() -> Drawing:
    one = start()
    one.grid("student sees", all_of(CONTEXT, "seen"))
    one.arrow()
    one.grid("asked: features", all_of(BLOCKS, "features"))
    one.x += 18
    one.grid("teacher sees", {}, default="seen")
    return one


def diet() -> Drawing:
    one = Drawing()
    one.grid("image 17 of n", {}, 6, "seen")
    one.arrow(6)
    one.grid("encoder sees a view", {}, default="seen", corner=(1, 2))
    one.arrow()
    one.vector("asked: which of the n images?")
    return one


def jigsaw() -> Drawing:
    one = start()
    one.loose("encoder sees", MIXED[:8])
    one.arrow()
    one.grid("asked: their places", all_of(MIXED[:8], "place"))
    return one


def part() -> Drawing:
    one = start()
    one.loose("cut anywhere", MIXED[3:11], MIXED[4:6])
    one.arrow()
    one.pair("asked: how far apart?", MIXED[4], MIXED[5])
    return one


def loca() -> Drawing:
    one = Drawing()
    one.grid("image", {}, 6, "seen")
    one.arrow(6)
    inside = [(0, 0), (1, 3), (2, 1)]  # in the teacher's crop, which begins a patch later than the centre
    one.loose("query sees", [(-1, 2), (0, 3), *((row + 1, column + 1) for row, column in inside)], columns=2)
    one.x += 18
    one.grid("teacher sees", {}, default="seen", corner=(2, 2))
    one.arrow()
    one.grid("asked: places there", all_of(inside, "place"), corner=(2, 2))
    return one


def nepa() -> Drawing:
    one = start()
    one.grid("encoder sees so far", all_of(INNER[:9], "seen"))
    one.arrow()
    one.grid("asked: the next one", {INNER[9]: "features"})
    return one


ABOUT = {
    mae: "mae: a quarter of the patches is seen; the pixels of the others are asked",
    crossmae: "crossmae: a quarter of the patches is seen; the pixels of a third of the others are asked",
    simmim: "simmim: mask tokens replace 60 % of the patches; their pixels are asked",
    droppos: "droppos: a quarter of the patches is seen, most without place; their places are asked",
    mp3: "mp3: all patches are seen without place; all places are asked",
    restore: "restore: a quarter of the patches of the centre is seen; the pixels of the whole canvas are asked",
    extrema: "extrema: five masks leave a fifth of the patches each; the teacher's vector of the whole image is asked",
    lut: "lut: a quarter of each of two crops is seen; pixels and the teacher's vector of the other crop are asked",
    distill: "distill: mask tokens replace 40 % of the patches; the teacher's features there are asked",
    latent: "latent: a part of the patches is seen; a teacher's features of several blocks are asked",
    diet: "diet: a random view is seen; which image of the training set it is is asked",
    jigsaw: "jigsaw: half of the patches are seen without place; their places are asked",
    part: "part: patches cut at any place are seen without it; how far one is from another is asked",
    loca: "loca: patches of one crop are seen without place; their places in another crop are asked",
    nepa: "nepa: the patches so far are seen; the embedding of the next one is asked",
}


def diagrams() -> dict[str, str]:
    """Return the text of each file by name."""
    return {f"task-{draw.__name__}.svg": draw().svg(about) for draw, about in ABOUT.items()}


def main() -> None:
    """Write the files."""
    for name, text in diagrams().items():
        (FOLDER / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
