"""Tables of the results of `gpu.py`, as Markdown for benchmarks/README.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Entry = dict[str, Any]


def markdown(kept: dict[str, Any]) -> str:
    """Return the page."""
    about = kept["about"]
    if not about:
        return ""
    parts = [f"# {about['machine']['name']}, {about['date'][:10]}\n\n{machine_line(about)}"]
    for section, table in TABLES.items():
        rows = kept["sections"].get(section, {})
        done = {name: one["result"] for name, one in rows.items() if one["state"] == "done"}
        if done:
            parts.append(table(done))
        parts += [missing(rows)] if len(done) < len(rows) else []
    return "\n\n".join(parts) + "\n"


def machine_line(about: Entry) -> str:
    """Return the line on machine, versions and date."""
    m = about["machine"]
    cuda = f", CUDA {m['cuda']}, driver {m.get('driver', 'unknown')}" if m["cuda"] else ""
    tiny = "A trial in miniature: the figures have no meaning. " if about["tiny"] else ""
    code = f" patchloom at {about['commit']}." if about["commit"] else ""
    return (
        f"{tiny}{m['name']}, {m['memory']:.0f} GiB, {m['cores']} cores; torch {m['torch']}{cuda}, Python {m['python']}."
        f"{code} `python benchmarks/gpu.py`, begun {about['begun']}."
    )


def table(heading: str, columns: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
    return f"## {heading}\n\n" + "\n".join(lines)


def missing(rows: dict[str, Entry]) -> str:
    """Return the rows without a result, and the reasons."""
    lines = []
    for name, one in rows.items():
        if one["state"] != "done":
            why = " ".join(one.get("error", [])[-2:]).strip()
            tries = f" (attempt {one['attempts']})" if one["attempts"] else ""
            lines.append(f"- {name}: {one['state']}{tries}. {why}")
    return "\n".join(line.rstrip() for line in lines)


def number(value: float | None, form: str = ",.0f") -> str:
    return "" if value is None or value is False else format(value, form)


def machine(done: dict[str, Entry]) -> str:
    one = done["figures"]
    rows = [[f"products in {dtype}", f"{rate / 1e12:,.3g} TFLOP/s"] for dtype, rate in one["products"].items()]
    rows.append(["copy within the memory", f"{one['copy'] / 1e12:.3g} TB/s"])
    if one["data sheet"]:
        rows.append(["data sheet, dense 16-bit products", f"{one['data sheet'] / 1e12:,.0f} TFLOP/s"])
    return table("The machine", ["", "measured"], rows)


def tests(done: dict[str, Entry]) -> str:
    one = done["pytest -m gpu"]
    if "absent" in one:
        return f"## The suite's GPU tests\n\nNot run: {one['absent']}."
    counts = ", ".join(f"{count} {how.lower()}" for how, count in one["counts"].items()) or "none ran"
    lines = [f"## The suite's GPU tests\n\n`pytest -m gpu`: {counts}."]
    for name in one["failed"]:
        alone = one["alone"].get(name)
        again = "" if alone is None else " passes alone" if alone["passed"] else " " + " ".join(alone["lines"])
        lines.append(f"- `{name}`{again}")
    return "\n".join(lines)


def work(one: Entry) -> list[str]:
    """Return the cells of a step."""
    low, high = one["range"]
    shares = [number(one["operations a second"] / 1e12, ",.3g"), number(one["of data sheet"], ".0%")]
    shares.append(number(one["of products"], ".0%"))
    seconds = f"{one['seconds']:.3g} [{low:.3g}, {high:.3g}]"
    return [str(one["batch"]), number(one["images/s"]), seconds, *shares, number(one["memory"], ".2f")]


WORK = ["batch", "images/s", "s a step [range]", "TFLOP/s", "of the data sheet", "of products here", "GiB"]


def steps(done: dict[str, Entry]) -> str:
    rows = []
    for name, one in done.items():
        gain = f"×{one['over eager']:.2f}" if "over eager" in one else ""
        rows.append([name, one["precision"], *work(one), number(one["waits"]), gain])
    return table("Steps", ["", "precision", *WORK, "waits a step", "over eager"], rows)


def peers(done: dict[str, Entry]) -> str:
    rows, absent = [], []
    for size, one in done.items():
        ours = one["rows"]["patchloom mae"]["images/s"]
        for name, row in one["rows"].items():
            rows.append([f"{size} {name}", row["attention"], *work(row), f"×{ours / row['images/s']:.2f}"])
        absent = one["absent"]
    told = table("Beside the peers", ["", "attention", *WORK, "ours over it"], rows)
    return told + (f"\n\nNot installed: {', '.join(absent)}." if absent else "")


def training(done: dict[str, Entry]) -> str:
    rows = []
    for task, one in done.items():
        where = ", ".join(
            f"{place} ({count})" for place, count in sorted(one["where"].items(), key=lambda x: -x[1])[:4]
        )
        waits = [number(one["waits"].get(name), ".1f") for name in ("forward", "update", "send")]
        rows.append([task, str(one["steps"]), number(one["images/s"]), *waits, where])
    columns = ["", "steps", "images/s", "waits a forward and backward", "waits an update", "waits a batch", "where"]
    return table("Training: how often it waits for the GPU", columns, rows)


def group(done: dict[str, Entry]) -> str:
    rows = []
    for name, one in done.items():
        made = ", ".join(f"{kind} {count}" for kind, count in one["collectives"].items())
        backend = f"{one['backend']} {one['nccl'] or ''}".strip()
        rows.append([name, backend, made, f"{one['difference']:.1e}"])
    columns = ["", "backend", "collectives", "largest difference from a run without"]
    return table("A group of one process", columns, rows)


def loading(done: dict[str, Entry]) -> str:
    rows = [
        [name, str(one.get("workers", "")), number(one["images/s"]), one.get("waiting for data", "")]
        for name, one in done.items()
    ]
    told = table("Loading, 224-px crops of 500 x 375 JPEGs", ["", "workers", "images/s", "waiting"], rows)
    needed = next((one["needed"] for one in done.values() if one.get("needed")), None)
    return told + (
        f"\n\nThe fastest step, {needed['row']}, takes {needed['images/s']:,.0f} images/s." if needed else ""
    )


def cifar(done: dict[str, Entry]) -> str:
    rows = []
    for task, one in done.items():
        cells = []
        for protocol in ("knn", "linear"):
            values = one["learnt"].get(protocol, {})
            cells.append(" / ".join(number(values.get(name), ".1%") for name in ("trained", "untrained", "raw pixels")))
        beside = ", ".join(f"{name.split(':')[1]} {value:.3f}" for name, value in one["baselines"].items())
        work = [str(one["epochs"]), number(one["samples"]), f"{one['trained seconds'] / 60:.1f}"]
        pace = [number(one["images/s"]), one["waiting for data"]]
        rows.append([f"{task} on {one['data']}", *work, *pace, f"{one['measure']:.3f} ({beside})", *cells])
    columns = ["", "epochs", "samples", "minutes", "images/s", "waiting", "held-out measure"]
    columns += ["kNN: trained / untrained / raw pixels", "linear, the same"]
    return table("CIFAR-10, or the data used instead", columns, rows)


TABLES: dict[str, Callable[[dict[str, Entry]], str]] = {
    "machine": machine, "tests": tests, "steps": steps, "peers": peers, "training": training, "group": group,
    "loading": loading, "cifar": cifar,
}  # fmt: skip


def outcome_line(section: str, told: Entry) -> str:
    """Return one line on the outcome of a row."""
    if told["state"] != "done":
        return f"{told['state']}: {' '.join(told.get('error', [])[-1:])[:160]}"
    result, after = told["result"], f"{told['seconds']:.0f} s"
    if "images/s" in result:
        return f"{after}: {number(result['images/s'])} images/s"
    if "counts" in result:
        return f"{after}: {result['counts']}"
    return after
