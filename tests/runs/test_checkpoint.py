"""Checkpoints and run folders: round trips, compatibility with older versions, and error messages."""

from dataclasses import replace

import pytest
import torch
from resolved import resolved_settings
from safetensors.torch import save_file

from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import checksum
from patchloom.runs import checkpoint
from patchloom.runs.checkpoint import Checkpoints, SaveTimer, restore, tensors_of
from patchloom.runs.folder import RunFolder, metrics_row, write_metrics
from patchloom.runs.settings import Settings
from patchloom.runs.training_set import no_record
from patchloom.tasks import build_task, with_defaults
from patchloom.train.step import build_optimizer

SIZES = {"embed_dim": 32, "depth": 1, "num_heads": 2}


def make(seed=0, name="mae"):
    torch.manual_seed(seed)
    task = build_task({"name": name}, build_encoder(EncoderSpec("nano", (16, 16), 4, options=SIZES)))
    optimizer = build_optimizer(task, 0.05, "cpu")
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    return task, optimizer


def step(task, optimizer, number):
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(number))
    task(images, progress=0.0, generator=torch.Generator().manual_seed(number)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save(folder, task, optimizer, number):
    kept = Checkpoints(folder)
    kept.save(tensors_of(task, optimizer), {"step": number})
    return kept


def test_resuming_equals_an_uninterrupted_run(tmp_path):
    task, optimizer = make()
    for number in range(3):
        step(task, optimizer, number)
    save(tmp_path, task, optimizer, 3)
    other, fresh = make(seed=9)
    tensors, about, problems = Checkpoints(tmp_path).read()
    restore(tensors, other, fresh)
    assert about == {"step": 3} and problems == []
    for group in fresh.param_groups:
        group["lr"] = 1e-3
    for number in range(3, 6):
        step(task, optimizer, number)
        step(other, fresh, number)
    for (name, one), two in zip(task.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


def test_checkpoints_are_readable_by_others(tmp_path):
    (tmp_path / "plain").write_text("")
    kept = save(tmp_path, *make(), 0)
    assert kept.last.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_checkpoint_without_a_checksum_gives_weights_but_cannot_be_resumed(tmp_path):
    task, optimizer = make()
    kept = save(tmp_path, task, optimizer, 0)
    tensors, _, _ = kept.read()
    save_file(tensors, kept.last, {"about": "{}"})
    assert kept.weights().keys() == task.state_dict().keys()
    with pytest.raises(PatchloomError, match="no checksum, .* --from can load its weights"):
        kept.read()


@pytest.mark.parametrize(
    "about", ["[]", '{"best": "x"}', '{"step": "3"}', '{"step": 2.5}', '{"step": -1}', '{"step": NaN}', "[" * 10**5]
)
def test_values_of_a_stranger_are_checked(about, tmp_path):
    kept = save(tmp_path / "checkpoints", *make(), 0)
    tensors, _, _ = kept.read()
    save_file(tensors, kept.last, {"about": about, "sha256": checksum(tensors, about)})
    with pytest.raises(PatchloomError, match="is damaged"):
        kept.newest()
    assert kept.about() == {} and kept.progress() == (0, 0.0)


def test_another_tasks_checkpoint_is_refused(tmp_path):
    save(tmp_path, *make(), 0)
    with pytest.raises(PatchloomError, match="another task or model"):
        restore(Checkpoints(tmp_path).read()[0], make(name="droppos")[0])


def test_a_checkpoint_of_an_older_version_is_refused_with_a_remedy(tmp_path):
    task, optimizer = make()
    own = tensors_of(task, optimizer)
    older = {name.replace("questions.pixels.decoder", "decoder"): value for name, value in own.items()}
    assert older.keys() != own.keys()
    with pytest.raises(PatchloomError) as refusal:
        restore(older, task)
    said = str(refusal.value)
    assert "an older patchloom (it has decoder." in said and "and it lacks questions.pixels.decoder." in said
    assert "use the version that wrote it" in said and "--from" in said
    assert len(said) < 500
    lacking = {name: value for name, value in own.items() if not name.startswith("questions.pixels.decoder.answer")}
    with pytest.raises(PatchloomError, match=r"older patchloom \(it lacks questions.pixels.decoder.answer.bias\)"):
        restore(lacking, task)


def test_a_checkpoint_of_another_size_is_refused(tmp_path):
    task, optimizer = make()
    wider = {
        name: torch.cat([value, value]) if value.ndim else value for name, value in tensors_of(task, optimizer).items()
    }
    with pytest.raises(PatchloomError, match="another task or model: .* size mismatch"):
        restore(wider, task)


ASKED = Settings("photos/", {"name": "mae", "mask_ratio": 0.75}, {"name": "auto"})
RESOLVED = resolved_settings(img_size=(32, 64), epochs=10)
STATS = Stats((0.5, 0.4, 0.3), (0.2, 0.2, 0.2), 32, 64, 10, [])


def test_a_run_is_recognised_and_restores_its_settings(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert not folder.holds(ASKED)
    folder.begin(ASKED, RESOLVED, {"img_size": "as the images"}, STATS, "abc", {}, no_record())
    assert folder.holds(ASKED)
    assert folder.read_config() == RESOLVED
    assert folder.read_data()["mean"] == [0.5, 0.4, 0.3] and folder.read_data()["fingerprint"] == "abc"
    assert "# img_size: as the images" in folder.config.read_text()


def test_other_settings_are_refused_with_the_difference(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(ASKED, RESOLVED, {}, STATS, "abc", {}, no_record())
    other = Settings("photos/", {"name": "mae", "mask_ratio": 0.5}, {"name": "auto"}, epochs=9)
    with pytest.raises(PatchloomError, match="epochs: was auto, now 9; task.mask_ratio: was 0.75, now 0.5"):
        folder.holds(other)


def test_the_value_of_auto_is_no_difference(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(ASKED, replace(RESOLVED, epochs=9), {}, STATS, "abc", {}, no_record())
    assert folder.holds(replace(ASKED, epochs=9, patch_size=4, img_size=(32, 64), model={"name": "nano"}))
    with pytest.raises(PatchloomError, match=r"with other settings \(epochs: was auto, now 8\): for a new run, give"):
        folder.holds(replace(ASKED, epochs=8))


def test_options_of_another_task_or_model_are_not_listed(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(ASKED, RESOLVED, {}, STATS, "abc", {}, no_record())
    other = replace(
        ASKED, data="other/", task={"name": "droppos", "mask_ratio": 0.1}, model={"name": "mini", "depth": 3}
    )
    said = "data: was photos/, now other/; model: was auto, now mini; task: was mae, now droppos"
    with pytest.raises(PatchloomError, match=rf"run holds a run with other settings \({said}\)"):
        folder.holds(other)
    folder.summary.write_text("Done.\n")
    many = replace(ASKED, epochs=8, seed=1, clip=2.0, flip=False, blr=1.0, batch_size=3, held_out=0.3)
    with pytest.raises(PatchloomError, match=r"holds a finished run .*; and 1 more\): .* --out or delete this one"):
        folder.holds(many)


def test_a_run_of_an_older_version_is_recognised(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(ASKED, RESOLVED, {}, STATS, "abc", {}, no_record())
    for file in (folder.requested, folder.config):
        kept = [line for line in file.read_text().splitlines() if not line.startswith(("compile", "threads", "# if"))]
        file.write_text("\n".join(kept) + "\n")
    assert folder.holds(ASKED) and (config := folder.read_config()).compile is False
    assert config.threads == torch.get_num_threads()
    with pytest.raises(PatchloomError, match="compile: was auto, now True"):
        folder.holds(replace(ASKED, compile=True))


def test_an_option_that_a_task_did_not_have_is_at_its_default(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(ASKED, RESOLVED, {}, STATS, "abc", {}, no_record())
    now = replace(ASKED, task=with_defaults(ASKED.task))
    assert folder.holds(now)
    with pytest.raises(PatchloomError, match="task.normalized_pixels: was True, now False"):
        folder.holds(replace(ASKED, task=now.task | {"normalized_pixels": False}))


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(PatchloomError, match="holds no run of patchloom"):
        RunFolder(tmp_path).holds(ASKED)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_columns_may_appear_later(tmp_path):
    rows = [{"step": 10, "loss": 10 / 7}, {"step": 20, "loss": 20 / 7, "knn": 0.5}]
    write_metrics(tmp_path / "metrics.csv", [metrics_row(row) for row in rows])
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,loss,knn", "10,1.42857,", "20,2.85714,0.5"]


# When the next checkpoint is due: soon after the start, then ever later, never so often that writing takes long.


@pytest.mark.parametrize(
    ("limits", "took", "pauses"),
    [
        ((5, 60, 600), 0.0, [5, 10, 20, 40, 60, 60]),  # a run
        ((5, 60, 600), 2.0, [5, 40, 60, 60, 60, 60]),
        ((5, 60, 600), 9.0, [5, 180, 180, 180, 180, 180]),
        ((5, 60, 600), 40.0, [5, 600, 600, 600, 600, 600]),
        ((30, 30), 0.0, [30] * 6),  # a training of an evaluation
        ((30, 30), 9.0, [30] + [180] * 5),
    ],
)
def test_seconds_between_checkpoints(monkeypatch, limits, took, pauses) -> None:
    now = [100.0]
    monkeypatch.setattr(checkpoint.time, "perf_counter", lambda: now[0])
    timer, found = SaveTimer(*limits), []
    for _ in range(6):
        begun = now[0]
        while not timer.due:
            now[0] += 1
        found.append(now[0] - begun - 1)  # due once more than the pause has passed
        timer.saved(took)
    assert found == pauses
