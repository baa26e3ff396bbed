"""Study of measures without labels: ρ, its intervals, and the choice of encoders."""

import json
from pathlib import Path

import label_free
import numpy as np
import pytest
from scipy.stats import spearmanr


def test_rho_is_spearmans_with_ties() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, (2, 5, 20)).astype(float)
    ours = label_free.spearman(x, y)
    assert ours == pytest.approx([spearmanr(one, other).statistic for one, other in zip(x, y, strict=True)])
    assert np.isnan(label_free.spearman(np.ones(4), np.arange(4.0)))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Results of seven tasks, all lengths, two seeds: RankMe ranks the tasks correctly, LiDAR only the lengths."""
    for number, task in enumerate(label_free.TASKS):
        for epochs in label_free.EPOCHS:
            for seed in label_free.SEEDS:
                good = number + 10 * epochs + 0.1 * seed
                noise = np.random.default_rng((number, epochs, seed)).random()
                found = dict.fromkeys(label_free.MEASURES, noise) | {"kNN": good / 1000, "linear": good / 500}
                found |= {"RankMe": good**3, "LiDAR": epochs + noise, label_free.EFFECT: -good}
                (tmp_path / f"{task}-{epochs}-{seed}.json").write_text(json.dumps(found))
    for seed in label_free.SEEDS:
        found = dict.fromkeys(label_free.MEASURES, 0.0) | {"kNN": 0.01 * seed, "linear": 0.02}
        (tmp_path / f"untrained-0-{seed}.json").write_text(json.dumps(found))
    return tmp_path


def test_the_table(results: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_free, "DRAWS", 100)
    label_free.table(results)
    said = capsys.readouterr().out
    assert "44 encoders, 14 of 4 epochs, 14 of 16 epochs, 14 of 32 epochs" in said
    cells = {line.split(" | ")[0].lstrip("| "): line.rstrip(" |").split(" | ")[1:] for line in said.splitlines()}
    assert cells["RankMe"][1:3] == ["+1.00 [+1.00, +1.00]", "[+1.00, +1.00]"] and cells["RankMe"][0].startswith("+1.0")
    assert cells[label_free.EFFECT][0] == "-1.00 [-1.00, -1.00]"  # of the 42 that have one
    assert float(cells["LiDAR"][0].split()[0]) > 0.6 > abs(float(cells["LiDAR"][1].split()[0]))
    low, high = (float(one) for one in cells["LiDAR"][1].split("[")[1].rstrip("]").split(", "))
    assert low < 0 < high


def test_the_effect_is_by_the_last_validation_and_the_best_baseline_to_beat(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    for table in (
        "step,held_out,baseline:mean colour,baseline:blurred copy\n0,2,,\n9,0.6,0.5,0.8\n10,,,\n",
        "step,held_out,baseline:flat patches,baseline:what was given\n9,0.6,1.2,0.8\n",
        "step,held_out,baseline:chance\n9,0.4,0.2\n",
    ):
        metrics.write_text(table)
        assert label_free.own_effect(tmp_path) == pytest.approx(0.25)


def test_the_table_of_epochs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """In each of two runs RankMe orders the epochs as mIoU does, IdEst falls with it, and the last epoch is worst."""
    for seed in (0, 1):
        for epoch, score in ((5, 0.3), (10, 0.5), (15, 0.2)):
            found = dict.fromkeys(label_free.MEASURES, 1.0) | {"RankMe": score, "IdEst": 9 - score, "mIoU": score}
            found |= {label_free.SEPARATION: score, label_free.DENSE_DIMENSIONS: 1 - epoch / 100}
            (tmp_path / f"mae-{epoch}-{seed}.json").write_text(json.dumps(found))
    label_free.epochs_table(tmp_path)
    said = capsys.readouterr().out
    assert "mIoU over epochs [5, 10, 15]: 30.0% 50.0% 20.0%" in said and "2 runs" in said
    cells = {line.split(" | ")[0].lstrip("| "): line.rstrip(" |").split(" | ")[1:] for line in said.splitlines()}
    assert cells["RankMe"] == cells["IdEst"]
    assert cells["RankMe"] == ["+1.00 (+1.00 to +1.00)"] * 2 + ["0.0 (0.0 to 0.0)", "2 of 2"]
    assert cells[label_free.LAST][2:] == ["30.0 (30.0 to 30.0)", "0 of 2"] and cells[label_free.LAST][0][:5] == "-0.33"
