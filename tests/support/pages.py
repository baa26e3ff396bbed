"""Report pages with drawn pictures and invented numbers."""

import base64
import io
import math
import wave

import numpy as np
from PIL import Image

from patchloom.look.charts import Line, Panel
from patchloom.report.page import Cloud, Number, Page, Picture, Recording, RunPart, Setting, Slider, Table
from patchloom.results.result import Result

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><script>alert(3)</script>",
    "'-alert(4)-'",
    "two\nlines",
    "a\u2028b\u2029c",
    "{{ 7 * 7 }} ${alert(5)} <!--",
    "javascript:alert(6)",
    "&lt;b&gt;",
    "\udcff.png",  # how Python reads a file name that is no UTF-8
]
CLASSES = ["circle", "square", "triangle", "star"]
_COLOURS = ["#2b6cb0", "#c05621", "#2f855a", "#97266d"]


def uri_of(image: Image.Image) -> str:
    written = io.BytesIO()
    image.save(written, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def picture(title: str = "Recovered", width: int = 640, height: int = 320, grid: int = 8, seed: int = 0) -> Picture:
    """Draw a grid of coloured patches."""
    colours = np.random.default_rng(seed).integers(60, 230, (grid, 2 * grid, 3), dtype=np.uint8)
    image = Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)
    caption = "Left the image, in the middle what the encoder was given, right what it gave back."
    return Picture(title, caption, f"{title}: a grid of coloured patches", uri_of(image), width, height)


def cloud(n: int = 60, names: list[str] | None = None, classes: list[str] | None = None, side: int = 32) -> Cloud:
    """Return a map of ``n`` squares of a colour, clustered by class, with exact neighbours."""
    classes = CLASSES if classes is None else classes
    draws = np.random.default_rng(0)
    labels = [i % len(classes) if classes else -1 for i in range(n)]
    centres = draws.normal(size=(max(1, len(classes)), 6))
    features = np.stack([centres[label] + 0.35 * draws.normal(size=6) for label in labels])
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    alike = unit @ unit.T
    np.fill_diagonal(alike, -2)
    nearest = np.argsort(-alike, axis=1)[:, : min(8, n - 1)]
    columns = min(n, 20)
    sprite = Image.new("RGB", (columns * side, math.ceil(n / columns) * side), "white")
    for i, label in enumerate(labels):
        x, y = i % columns * side, i // columns * side
        sprite.paste(_COLOURS[label % len(CLASSES)], (x, y, x + side, y + side))

    def flat(values: np.ndarray) -> tuple[list[float], list[float]]:
        spread = (values - values.min(0)) / np.maximum(np.ptp(values, axis=0), 1e-9)
        return spread[:, 0].tolist(), spread[:, 1].tolist()

    return Cloud(
        projections={"PCA": flat(features[:, :2]), "t-SNE": flat(np.tanh(features[:, 2:4]))},
        names=names or [f"{classes[label] if classes else 'image'}/{i:04}.png" for i, label in enumerate(labels)],
        labels=labels,
        classes=classes,
        neighbours=nearest.tolist(),
        similarities=np.take_along_axis(alike, nearest, axis=1).round(3).tolist(),
        sprite=uri_of(sprite),
        columns=columns,
        side=side,
        note="Held-out images. Near each other means alike to the encoder; distances between groups mean little.",
    )


def recording(name: str = "yes/0001.wav") -> Recording:
    """Return a tone of 0.1 s."""
    written = io.BytesIO()
    with wave.open(written, "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes((8000 * np.sin(np.arange(800) * 2 * np.pi * 440 / 8000)).astype("<i2").tobytes())
    uri = f"data:audio/wav;base64,{base64.b64encode(written.getvalue()).decode()}"
    return Recording(name, "440 Hz for a tenth of a second.", picture(name, 392, 160, 10), uri)


def slider(name: str = "street/0001.png") -> Slider:
    """Return a picture as it is and as predicted."""
    truth, answer = (picture(title, 320, 220, seed=seed) for title, seed in (("truth", 3), ("answer", 4)))
    return Slider(name, "A grid, and another one.", truth, answer)


def value(encoder: str, found: float, unit: str = "%", reach: float = 0.0) -> Result:
    """Return a result of an encoder with an interval of ``reach`` to either side."""
    return Result("accuracy", found, found - reach, found + reach, 2000, encoder, unit=unit)


def chart(names: list[str], points: int = 60, title: str = "kNN accuracy, held-out images") -> Panel:
    """Return rising curves, with a gap of one point in the first, and a baseline."""
    x = [100 * (i + 1) / points for i in range(points)]
    rising = [
        [0.5 - (0.4 - 0.05 * k) * math.exp(-one / 25) + 0.004 * math.sin(one) for one in x] for k, _ in enumerate(names)
    ]
    if points > 4:
        rising[0][points // 2] = math.nan
    lines = [Line(name, x, y) for name, y in zip(names, rising, strict=True)]
    return Panel(
        title,
        "Measured after each epoch.",
        [*lines, Line("raw pixels", [x[0], x[-1]], [0.17, 0.17], dashed=True)],
        True,
    )


def run_part(name: str = "shapes-mae", tone: str = "good") -> RunPart:
    """Return a run with all parts."""
    controls = {"untrained encoder": 0.111, "raw pixels": 0.173, "chance": 0.04}
    beside = [value(name, found) for name, found in controls.items()]
    return RunPart(
        name,
        "finished: 100 epochs in 41 minutes on two cores",
        verdict={"good": "Healthy", "fair": "Learning slowly", "bad": "It does not learn"}.get(
            tone, "Too early to say"
        ),
        tone=tone,
        why="Its features tell 30.2 % of the held-out images apart, an untrained encoder 11.1 %, and it still rises.",
        then="train longer: the curve has not levelled off. --epochs 200 would take about 80 minutes.",
        summary="mae: learnt 43 % [41, 45] of what there is between the mean colour and the image; this says nothing "
        "about classes.",
        numbers=[
            Number("kNN accuracy", value("", 0.302, reach=0.011), beside, "2,000 held-out images, k = 20"),
            Number("linear probe", value("", 0.354, reach=0.012), [value("untrained encoder", 0.223)]),
            Number(
                "rank of the features", value("", 87.2, ""), [value("untrained encoder", 12.9, "")], "effective rank"
            ),
        ],
        settings=[
            Setting("task", "mae"),
            Setting("batch_size", "256", "fits the memory of this machine twice"),
            Setting("base_learning_rate", "0.00015", "of the paper"),
            Setting("mask_ratio", "0.75", "of the paper"),
        ],
        pictures=[picture("Recovered"), picture("Put together again", seed=1), picture("Attention", 320, 320, seed=2)],
        cloud=cloud(),
        recordings=[recording()],
        sliders=[slider()],
        tables=[
            Table(
                "Probes of each layer",
                ["layer", "kNN", "linear probe"],
                [["4", "21.0 %", "29.8 %"], ["8", "27.4 %", "33.0 %"], ["12", "30.2 %", "35.4 %"]],
                "The last layer is the best one.",
            )
        ],
        files=["2 of 5,000 files cannot be read: broken/0001.png, broken/0002.png.", "14 images are there twice."],
        about=[
            ("machine", "2 cores of a Xeon, 24 GB"),
            ("versions", "patchloom 0.1.0, torch 2.11, timm 1.0.29"),
            ("data", "shapes: 4,000 drawn images of 25 classes"),
        ],
        command="patchloom pretrain shapes --task mae --epochs 100 --seed 0",
    )


def one_run(tone: str = "good") -> Page:
    charts = [
        chart(["shapes-mae"]),
        Panel("Loss", "Of each epoch.", [Line("shapes-mae", [1, 2, 3, 4], [0.9, 0.5, 0.4, 0.35])]),
    ]
    return Page("shapes-mae", "2026-11-22T20:00:00Z", "0.1.0", charts=charts, runs=[run_part(tone=tone)])


def comparison() -> Page:
    names = ["shapes-droppos", "shapes-mae", "shapes-mp3"]
    table = Table(
        "kNN accuracy on 2,000 held-out images",
        ["run", "kNN accuracy", "95 % interval", "beside untrained", "told apart from the best"],
        [
            ["shapes-droppos", "30.2 %", "[29.1, 31.3]", "+19.1", "–"],
            ["shapes-mae", "27.5 %", "[26.4, 28.6]", "+16.4", "yes"],
            ["shapes-mp3", "29.6 %", "[28.5, 30.7]", "+18.5", "no"],
        ],
        "Intervals are of the images, not of the seeds: a second seed may move each run by about a point.",
    )
    return Page(
        "Three tasks on shapes",
        *("2026-11-22T20:00:00Z", "0.1.0"),
        lead=[
            "droppos is best on these images, mae is behind it, and mp3 cannot be told apart from it.",
            "30.2 % [29.1, 31.3] of the held-out images are told apart by kNN, 27.5 % [26.4, 28.6] with mae.",
        ],
        tone="good",
        tables=[table],
        charts=[chart(names)],
        runs=[run_part(name, tone) for name, tone in zip(names, ["good", "fair", "bad"], strict=True)],
        notes=["One seed each.", "All runs had the same images, model and number of epochs."],
    )


def hostile() -> Page:
    """Return a page whose texts are all injection attempts, with curves of no point and of one."""
    text = iter(HOSTILE * 30)
    n = len(HOSTILE)
    image = picture(next(text))._replace(caption=next(text), alt=next(text))
    part = RunPart(
        HOSTILE[1],
        *[next(text) for _ in range(2)],
        "bad",
        *[next(text) for _ in range(3)],
        numbers=[Number(next(text), value("", 0.5), [value(one, 0.5) for one in HOSTILE], next(text))],
        settings=[Setting(one, one, one) for one in HOSTILE],
        pictures=[image._replace(title=one) for one in HOSTILE],
        cloud=cloud(n, list(HOSTILE), list(HOSTILE)),
        recordings=[recording(HOSTILE[0])],
        sliders=[slider(HOSTILE[1])],
        tables=[Table(HOSTILE[2], HOSTILE, [HOSTILE, HOSTILE], HOSTILE[0])],
        files=HOSTILE,
        about=[(one, one) for one in HOSTILE],
        command="\n".join(HOSTILE),
    )
    return Page(
        HOSTILE[0],
        HOSTILE[1],
        HOSTILE[2],
        lead=HOSTILE,
        tone="fair",
        tables=[Table(HOSTILE[0], HOSTILE, [HOSTILE], HOSTILE[1])],
        charts=[
            Panel(
                HOSTILE[2], HOSTILE[0], [Line(one, [0, 1], [0, i]) for i, one in enumerate(HOSTILE)], axis=HOSTILE[1]
            ),
            Panel("nothing", "", [Line("none", [], [])]),
            Panel("a hole", "", [Line("one", [1], [math.nan]), Line("two", [1], [2])]),
        ],
        runs=[part],
        notes=HOSTILE,
    )
