"""Tests of plots of several runs: drawn values, tables, and incomparable runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from matplotlib.axes import Axes
from PIL import Image
from refusing import failed, refusal
from resolved import VALUES
from running import csv_rows

from patchloom.cli import main
from patchloom.look.run_curves import draw_run_curves, lines_of, panel_of, setting_of
from patchloom.results import store
from patchloom.results.result import Result
from patchloom.runs.past import load_runs
from patchloom.runs.settings import Settings

ASKED = Settings("photos", task={"name": "mp3", "context_mask_ratio": 0.75}, model={"name": "auto"})
AUTO = VALUES | {"img_size": (32, 32), "patch_size": 4, "positions": "none", "channels": 3}
AUTO |= {"epochs": 100, "batch_size": 64}
Make = Callable[..., Path]


def add_result(
    run: Path, protocol: str, value: float, control: float = 0.2, seed: int = 0, encoder: str = "", **how
) -> None:
    """Append the results of an evaluation, dated after all others; the encoder's and its control's are quoted."""
    name = "from scratch" if protocol == "finetune" else "untrained"
    settings = {"pooling": "mean"} | how
    about = {"data": "labelled", "seed": seed, "date": f"2026-01-01T00:00:{len(store.load(run)):02}"}
    values = ((encoder or run.name, value), (name, control), ("best constant", 0.1))
    results = [Result.of_share(of, protocol, settings, one, 50) for of, one in values]
    store.append(run, [replace(one, **about, quoted=one.encoder != "best constant") for one in results])


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.chdir(tmp_path)

    def run(name: str, losses=(2.0, 1.0, 0.5), found: float | None = 0.6, **asked) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        task = {**ASKED.task, **asked.pop("task", {})}
        wanted = replace(ASKED, task=task, **asked)
        became = {**wanted.plain(), **{k: v for k, v in AUTO.items() if k not in asked}}
        became["warmup_epochs"] = became["epochs"] / 10
        became |= {"blr": 0.004, "img_size": list(became["img_size"]), "task": task}
        became["model"] = {"name": "nano"} if wanted.model["name"] == "auto" else wanted.model
        for file, values in (("requested.yaml", wanted.plain()), ("config.yaml", became)):
            (folder / file).write_text(yaml.safe_dump(values))
        # as mp3 logs it, whose position accuracy has no column in training
        lines = ["epoch,loss,context_top1_accuracy,held_out,baseline:chance"]
        lines += [f"{i + 1},{loss},,," for i, loss in enumerate(losses)]
        if found is not None:
            lines[2] = f"2,{losses[1]},0.2,0.3,0.015625"
            lines[-1] = f"{len(losses)},{losses[-1]},0.5,{found},0.015625"
        (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
        return folder

    return run


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list, list]]:
    found = []
    plot = Axes.plot

    def noted(self, x, y, *args, **kwargs):
        found.append((kwargs.get("linestyle", "-"), list(x), list(y)))
        return plot(self, x, y, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", noted)
    return found


def test_losses_are_those_of_the_runs_tables(make: Make, drawn: list) -> None:
    one, other = make("a", (2.0, 1.0, 0.5)), make("b", (8.0, 6.0, 6.0, 4.0), task={"name": "mae"}, found=None)
    picture, points = draw_run_curves([one, other], out=Path("x"))
    assert (picture, points) == (Path("x/losses.png"), Path("x/losses.csv")) and Image.open(picture).width
    rows = csv_rows(points)
    assert [(row["run"], row["task"], float(row["epoch"]), float(row["loss"])) for row in rows] == [
        *(("a", "mp3", 1, 2), ("a", "mp3", 2, 1), ("a", "mp3", 3, 0.5)),
        *(("b", "mae", 1, 8), ("b", "mae", 2, 6), ("b", "mae", 3, 6), ("b", "mae", 4, 4)),
    ]
    assert [float(row["relative"]) for row in rows] == [1, 0.5, 0.25, 1, 0.75, 0.75, 0.5]
    assert [y for _, _, y in drawn] == [[2, 1, 0.5], [8, 6, 6, 4], [1, 0.5, 0.25], [1, 0.75, 0.75, 0.5]]


def test_points_are_means_over_seeds_of_what_the_runs_hold(make: Make, drawn: list) -> None:
    reached = {("0.3", 0): 0.4, ("0.3", 1): 0.5, ("0.75", 0): 0.7, ("0.75", 1): 0.6}
    runs = []
    for (ratio, seed), value in reached.items():
        run = make(f"r{ratio}-{seed}", task={"context_mask_ratio": float(ratio)}, seed=seed, found=value)
        add_result(run, "finetune", value / 2, control=0.1, recipe="mae", epochs=5)
        runs.append(run)
    picture, points = draw_run_curves(runs, against="context_mask_ratio")
    assert picture.name == "against-task.context_mask_ratio.png" and Image.open(picture).width
    rows = csv_rows(points)
    found: dict[tuple, list] = {}
    for row in rows:
        numbers = [float(row[name]) for name in ("task.context_mask_ratio", "value", "low", "high")]
        found.setdefault((row["result"], row["control"], float(row["control_value"])), []).extend(numbers)
    assert found == {
        ("position-accuracy", "chance", 0.015625): pytest.approx([0.3, 0.45, 0.4, 0.5, 0.75, 0.65, 0.6, 0.7]),
        ("finetune", "from scratch", 0.1): pytest.approx([0.3, 0.225, 0.2, 0.25, 0.75, 0.325, 0.3, 0.35]),
    }
    assert rows[0]["runs"] == "r0.3-0 r0.3-1" and rows[2]["measured"] == "labelled, recipe mae, epochs 5, pooling mean"
    ys = [(style == "-", y) for style, _, y in drawn]
    expected_ys = [(True, [0.45, 0.65]), (False, [0.015625] * 2), (True, [0.225, 0.325]), (False, [0.1] * 2)]
    assert ys == [(solid, pytest.approx(y)) for solid, y in expected_ys]


def test_other_settings_that_differ_give_a_line_each_and_what_auto_became_does_not(make: Make) -> None:
    places = [
        make(f"{size}-{epochs}", epochs=epochs, patch_size=size, found=epochs / 1000 + size / 100)
        for size in (8, 4)
        for epochs in (100, 50)
    ]
    runs = load_runs(places)
    assert {run.became["warmup_epochs"] for run in runs} == {10, 5}  # which were auto in all
    assert setting_of(runs, "epochs") == ("epochs", [100, 50, 100, 50])
    assert lines_of(runs, "epochs") == ["patch_size 8", "patch_size 8", "patch_size 4", "patch_size 4"]
    rows = csv_rows(draw_run_curves(places, against="epochs")[1])
    assert [(row["line"], row["epochs"], float(row["value"])) for row in rows] == [
        *(("patch_size 8", "50", pytest.approx(0.13)), ("patch_size 8", "100", pytest.approx(0.18))),
        *(("patch_size 4", "50", pytest.approx(0.09)), ("patch_size 4", "100", pytest.approx(0.14))),
    ]
    assert {(row["measured"], row["control"]) for row in rows} == {("held-out images", "chance")}
    # a setting that has no numbers has places side by side, in the order of the runs
    others = [make("fixed", positions="sincos"), make("learnt", positions="learned")]
    rows = csv_rows(draw_run_curves(others, against="positions", of="position-accuracy")[1])
    assert [row["positions"] for row in rows] == ["sincos", "learned"]


def test_the_options_of_another_task_are_no_lines_and_a_compound_setting_is_one_value(make: Make) -> None:
    other = make("c", epochs=10, task={"name": "droppos", "mask_ratio": 0.5}, patch_size=8)
    runs = load_runs([make("a", epochs=10), make("b", epochs=20), other])
    assert lines_of(runs, "epochs") == [*["task mp3, patch_size 4"] * 2, "task droppos, patch_size 8"]
    runs = load_runs([make(f"{share}", task={"ask": {"pixels": share}}) for share in (1, 2)])
    assert setting_of(runs, "ask")[1] == ["{pixels: 1}", "{pixels: 2}"]


def test_results_have_their_own_unit(make: Make) -> None:
    places = [make("a", epochs=10), make("b", epochs=20)]
    for place, rank in zip(places, (12.5, 13.5), strict=True):
        rank = Result.exact("RankMe", place.name, "label-free", {}, rank, unit="")
        store.append(place, [replace(rank, quoted=True)])
    panel, rows = panel_of(load_runs(places), "label-free", ["", ""], [10, 20])
    assert (panel.show(13.5), panel.percent, [row[4] for row in rows]) == ("13.50", False, [12.5, 13.5])


def test_results_are_compared_that_were_measured_alike(make: Make) -> None:
    a, b = make("a", epochs=10), make("b", epochs=20)
    for run, value in ((a, 0.3), (b, 0.4)):
        add_result(run, "finetune", value, recipe="small", epochs=5)
        add_result(run, "finetune", value + 0.1, recipe="mae", epochs=5)  # the newest that both have
        add_result(run, "linear", value, l2=0.1 if run is a else 1e-6, pooling="class" if run is a else "mean")
        for seed, more in ((0, 0.0), (1, 0.2)):
            add_result(run, "knn", value + more, k=20, temperature=0.07, seed=seed)
    add_result(b, "finetune", 0.9, recipe="mae", epochs=5, encoder="from scratch")  # --from_scratch has no encoder
    add_result(a, "finetune", 0.8, recipe="mae", epochs=100)
    rows = csv_rows(draw_run_curves([a, b], against="epochs")[1])
    values = {(row["result"], row["epochs"]): float(row["value"]) for row in rows}
    assert values[("finetune", "10")] == pytest.approx(0.4) and values[("finetune", "20")] == pytest.approx(0.5)
    assert values[("linear", "10")] == pytest.approx(0.3) and values[("knn", "20")] == pytest.approx(0.5)
    add_result(a, "finetune", 0.45, recipe="mae", epochs=5)  # measured again
    (first, _) = csv_rows(draw_run_curves([a, b], against="epochs", of="finetune")[1])
    assert float(first["value"]) == pytest.approx(0.45)


def test_results_against_a_setting_of_the_evaluation(make: Make, drawn: list) -> None:
    """MP3 Fig. 5: one encoder, fine-tuned with several epochs."""
    a, b = make("a"), make("b", task={"context_mask_ratio": 0.5})
    for epochs, value in ((5, 0.3), (20, 0.5), (10, 0.1)):
        add_result(a, "finetune", value, control=value / 2, recipe="mae", epochs=epochs, warmup_epochs=epochs / 10)
    add_result(a, "finetune", 0.4, recipe="mae", epochs=10)  # measured again
    add_result(a, "finetune", 0.6, recipe="mae", epochs=10, seed=1)
    add_result(a, "finetune", 0.9, recipe="small", epochs=10)  # measured otherwise
    picture, points = draw_run_curves(a, against="finetune.epochs")
    assert picture.name == "against-finetune.epochs.png" and Image.open(picture).width
    rows = csv_rows(points)
    assert [(row["finetune.epochs"], float(row["value"])) for row in rows] == [("5", 0.3), ("10", 0.5), ("20", 0.5)]
    assert {row["control"] for row in rows} == {"from scratch"}
    assert {row["measured"] for row in rows} == {"labelled, recipe mae, pooling mean"}
    assert [(x, y) for style, x, y in drawn if style == "-"] == [([5, 10, 20], pytest.approx([0.3, 0.5, 0.5]))]
    add_result(b, "finetune", 0.7, recipe="mae", epochs=20)
    rows = csv_rows(draw_run_curves([a, b], against="finetune.epochs")[1])
    assert [(row["line"], row["finetune.epochs"]) for row in rows] == [
        *(("context_mask_ratio 0.75", epochs) for epochs in ("5", "10", "20")), ("context_mask_ratio 0.5", "20"),
    ]  # fmt: skip


def test_rows_of_one_evaluation_are_a_curve(make: Make) -> None:
    """MP3 Fig. 3: position accuracy against η; of DropPos the mean over the other ratio."""
    a = make("a")
    results = []
    for name, base in (("a", 0.3), ("chance", 0.1)):
        for measure, more in (("top-1", 0.0), ("top-5", 0.2)):
            for ratio, other in ((0.0, 0.25), (0.0, 0.75), (0.5, 0.25), (0.5, 0.75), ("average", "average")):
                value = base + more + (0.0 if ratio == "average" else ratio * other)
                settings = {"mask_ratio": ratio, "position_mask_ratio": other}
                one = Result.exact(measure, name, "positions", settings, value)
                results.append(replace(one, data="photos", quoted=(measure, ratio) == ("top-1", "average")))
    store.append(a, results)
    found = csv_rows(draw_run_curves(a, against="positions.mask_ratio")[1])
    assert [float(row["positions.mask_ratio"]) for row in found] == [0, 0.5]
    assert [float(row["value"]) for row in found] == pytest.approx([0.3, 0.55])
    assert [float(row["control_value"]) for row in found] == pytest.approx([0.1, 0.35])
    assert {row["measured"] for row in found} == {"photos"}


def test_knn_over_the_epochs_of_training(make: Make, drawn: list) -> None:
    """ExtreMA Figs. 4-5."""
    a, b = make("a"), make("b", epochs=5)
    assert "a did not measure knn" in refusal(draw_run_curves, [a, b], of="knn")
    for run, values in ((a, (0.1, 0.3)), (b, (0.2, 0.4))):
        (run / "metrics.csv").write_text("epoch,loss,knn\n" + "".join(f"{i},,{v}\n" for i, v in enumerate(values)))
    picture, points = draw_run_curves([a, b], of="knn")
    assert (picture.name, points.name) == ("knn.png", "knn.csv") and Image.open(picture).width
    assert [y for _, _, y in drawn] == [[0.1, 0.3], [0.2, 0.4]]
    found = [(row["run"], row["epoch"], float(row["knn"])) for row in csv_rows(points)]
    assert found == [("a", "0.0", 0.1), ("a", "1.0", 0.3), ("b", "0.0", 0.2), ("b", "1.0", 0.4)]
    assert "own representation" in refusal(draw_run_curves, [a, b], of="instance-knn")
    other = make("c", knn_k=200)
    (other / "metrics.csv").write_text((a / "metrics.csv").read_text())
    assert "different --knn_k or --knn_gallery" in refusal(draw_run_curves, [a, other], of="knn")


def test_what_cannot_be_compared_is_refused(make: Make, tmp_path: Path) -> None:
    a, b, bare = make("a", epochs=10), make("b", epochs=20), make("bare", epochs=30, found=None, losses=())
    broken, mae = make("broken", epochs=40), make("mae", task={"name": "mae"})
    (broken / "results.jsonl").write_text('{"protocol": "knn"}\n')
    settings = yaml.safe_load((mae / "config.yaml").read_text())
    (mae / "config.yaml").write_text(yaml.safe_dump({**settings, "task": {"name": "mae"}}))
    cases = [
        ([a], {}, "two runs or more"),
        ([a, b, a.parent / "." / "a"], {}, "given twice"),
        ([a, tmp_path / "none"], {}, "not the folder of a run"),
        ([a, bare], {}, "bare has logged no loss"),
        ([a, b], {"against": "patch_size"}, "all of these runs have patch_size 4"),
        ([a, b], {"against": "task"}, "task.name mp3"),  # as --task is typed
        ([a, b], {"against": "epoch"}, "did you mean epochs?"),
        ([a, b], {"of": "finetune"}, "--against SETTING"),
        ([a, b], {"against": "epochs", "of": "finetune"}, "no finetune results. They have position-accuracy"),
        ([a, bare], {"against": "epochs", "of": "position-accuracy"}, "no position accuracy"),
        ([b, bare], {"against": "epochs"}, "no result in common"),
        ([a, mae], {"against": "context_mask_ratio"}, "no setting task.context_mask_ratio"),
        ([a, broken], {"against": "epochs"}, "could not be read"),
        (a, {"against": "finetune.epochs"}, "no finetune results"),
    ]
    for runs, options, said in cases:
        assert said in refusal(draw_run_curves, runs, **options), options
    add_result(a, "finetune", 0.5, recipe="mae", epochs=5)
    add_result(bare, "finetune", 0.5, recipe="mae")
    cases = [
        ([a, bare], {"against": "finetune.epochs"}, f"finetune results of {bare} have none"),
        ([a, b], {"against": "epochs", "of": "finetune"}, f"patchloom evaluate finetune {b}"),
        ([a, b], {"against": "finetune.epochs"}, f"patchloom evaluate finetune {b}"),
        (a, {"against": "knn.k"}, "They have finetune"),
        (a, {"against": "finetune.epochs"}, "have epochs 5"),
        (a, {"against": "finetune.epoch"}, "did you mean epochs?"),
        (a, {"against": "finetune.epochs", "of": "knn"}, "leave out --of knn"),
    ]
    for runs, options, said in cases:
        assert said in refusal(draw_run_curves, runs, **options), options
    add_result(b, "finetune", 0.5, recipe="small", epochs=5)
    for options in ({"against": "finetune.epochs"}, {"against": "epochs", "of": "finetune"}):
        assert "not measured in the same way" in refusal(draw_run_curves, [a, b], **options)


def test_the_command_line_takes_any_number_of_runs(make: Make, capsys: pytest.CaptureFixture) -> None:
    runs = [make(name, epochs=epochs) for name, epochs in (("a", 5), ("b", 10), ("c", 20))]
    assert main(["look", "curves", *map(str, runs), "--against", "epochs"]) == 0
    printed = capsys.readouterr().out.split()
    assert [Path(path).name for path in printed] == ["against-epochs.png", "against-epochs.csv"]
    assert [float(row["epochs"]) for row in csv_rows(Path("against-epochs.csv"))] == [5, 10, 20]
    assert "did you mean --against?" in failed(capsys, "look", "curves", *map(str, runs), "--agianst", "epochs")
    assert main(["look", str(runs[0])]) == 2  # which is still the verb for one run; this one has no more files
    assert "data.yaml" in capsys.readouterr().err
