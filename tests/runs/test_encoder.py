"""Encoders of finished and interrupted runs, of files and of bare weights, their teachers, and verbs that take them."""

import re
import shutil
from pathlib import Path

import pytest
import timm
import torch
from killing import SMALL
from refusing import refusal
from safetensors.torch import load_file, save_file

import patchloom
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import extract
from patchloom.evaluate.protocols import evaluate
from patchloom.export.export import export
from patchloom.nets.checkpoints.origin import Weights
from patchloom.nets.encode import encode, patch_count
from patchloom.nets.finetune import without_last_norm
from patchloom.nets.heads import InstanceHead
from patchloom.report.report import report
from patchloom.results import store
from patchloom.runs.encoder import has_teacher, load_encoder, load_extra_module
from patchloom.runs.folder import suggest_run
from patchloom.runs.settings import request
from patchloom.runs.task import load_task
from patchloom.train.init import Start
from patchloom.train.loop import pretrain
from patchloom.withhold.encoder_input import all_patches

pytestmark = pytest.mark.usefixtures("quick_probe")

NAME = "vit_tiny_patch16_224"
REACHED = "step 6 of 6"
OPEN = {name: value for name, value in SMALL.items() if name not in ("model", "img_size", "patch_size")}
OPEN |= {"epochs": 0.4}


def same(one, other) -> bool:
    mine, its = (net if isinstance(net, dict) else net.state_dict() for net in (one, other))
    return mine.keys() == its.keys() and all(torch.equal(value, its[name]) for name, value in mine.items())


@pytest.fixture
def interrupted(small_run, tmp_path):
    """Return a function that copies a run as if it was interrupted after its last step."""

    def copy(task):
        folder = shutil.copytree(small_run(task), tmp_path / "runs" / task)
        for path in (folder / "summary.txt", *folder.glob("*.safetensors"), folder / store.FILE):
            path.unlink(missing_ok=True)
        for name in ("pictures", "teacher"):
            shutil.rmtree(folder / name, ignore_errors=True)
        return folder

    return copy


@pytest.mark.parametrize("task", ["droppos", "extrema"])
def test_an_interrupted_run_can_be_evaluated_exported_and_looked_at(task, interrupted, small_run, images, tmp_path):
    stopped, finished = interrupted(task), shutil.copytree(small_run(task), tmp_path / task)
    (vit, card), (whole, _) = (load_encoder(run) for run in (stopped, finished))
    assert same(vit, whole)
    assert card.name == f"{stopped.name} ({REACHED})" and f"{stopped} is not finished" in card.note
    ours, theirs = (evaluate("knn", run, images, device="cpu", ks=(5,)) for run in (stopped, finished))
    of_rows = [[(row.value, row.pooling) for row in found.results] for found in (ours, theirs)]
    assert of_rows[0] == of_rows[1]  # the instance head is there, too
    assert card.note in ours.method and "not finished" not in theirs.method
    assert ours.quoted[0].encoder == card.name and REACHED in (stopped / store.FILE).read_text()
    done = export(stopped)
    assert done.notes == (card.note,) and (done.head is None) == (task == "droppos")
    assert same(load_file(done.weights), whole)
    assert patchloom.look(stopped)
    assert isinstance(load_extra_module(stopped, "pooling"), InstanceHead) == (task == "extrema")


@pytest.mark.parametrize("option", ["init", "from_run"])
def test_a_run_starts_from_an_interrupted_one(interrupted, images, tmp_path, capsys, option):
    stopped = interrupted("droppos")
    pretrain(images, "mae", **OPEN | {option: str(stopped), "out": tmp_path / "new"})
    told = " ".join(capsys.readouterr().out.split())
    assert f"Weights from the encoder of {stopped}: 18 matched, 0 missing" in told
    assert f"is not finished: this is its newest checkpoint, {REACHED}." in told
    # what it trained on is known, so that its held-out images are new to both
    assert (tmp_path / "new" / "trained_on.bin").exists() and "may have been trained on" not in told


def test_a_run_without_its_files_says_which(interrupted, small_run, tmp_path):
    stopped = interrupted("droppos")
    shutil.rmtree(stopped / "checkpoints")
    with pytest.raises(PatchloomError, match="there is no encoder at .*: the run has no checkpoint yet"):
        load_encoder(stopped)
    run = shutil.copytree(small_run("droppos"), tmp_path / "run")
    (run / "encoder.safetensors").unlink()
    with pytest.raises(PatchloomError, match="the run has finished, .* delete summary.txt"):
        load_encoder(run)


def test_a_path_near_a_run_suggests_the_run(interrupted, monkeypatch):
    stopped = interrupted("droppos")
    runs = stopped.parent
    assert suggest_run(runs) == f"the run {stopped.name} is in it, so give {stopped}"
    shutil.copytree(stopped, runs / "zebra")
    assert suggest_run(runs).startswith(f"2 runs are in it ({stopped.name}, zebra), so give one of them, such as")
    for part in ("checkpoints", "checkpoints/last.safetensors", "config.yaml"):
        assert suggest_run(stopped / part) == f"it is part of the run {stopped}, so give {stopped}"
    assert suggest_run(runs / "zebre") == f"did you mean {runs / 'zebra'}?"
    monkeypatch.chdir(runs.parent)
    assert suggest_run("zebra") == f"did you mean {Path('runs') / 'zebra'}?"
    assert suggest_run(runs.parent / "elsewhere" / "zebra") == suggest_run("\0") == suggest_run("x" * 5000) == ""
    for said in (load_encoder, lambda path: evaluate("positions", path, "digits")):
        assert "it is part of the run" in refusal(said, stopped / "checkpoints" / "last.safetensors")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Folder with files of bare timm weights."""
    torch.manual_seed(0)
    vit, folder = timm.create_model(NAME, num_classes=7, depth=1), tmp_path_factory.mktemp("fetched")
    save_file(vit.state_dict(), folder / "one.safetensors")
    torch.save({"model": vit.state_dict(), "epoch": 3}, folder / "one.pth")
    return folder


@pytest.fixture
def shallow(monkeypatch):
    """Replace timm's model by one with a single block, for speed."""
    create = timm.create_model

    def made(name, **arguments):
        return create(name, **({"depth": 1} if name.startswith(NAME) else {}) | arguments)

    monkeypatch.setattr(timm, "create_model", made)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_bare_weights_are_evaluated_with_a_model_name(plain, shallow, images, suffix):
    path, tag = plain / f"one.{suffix}", f"{NAME}.augreg_in21k_ft_in1k"
    vit, card = load_encoder(path, tag)
    there = load_file(plain / "one.safetensors")
    assert all(torch.equal(value, there[name]) for name, value in vit.state_dict().items()) and not vit.training
    assert card.mean == card.std == (0.5, 0.5, 0.5) and card.name == "one"  # timm's of these weights, not ImageNet's
    assert "18 matched, 0 missing, 2 unexpected" in card.note and "head.bias" in card.note
    found = evaluate("knn", path, images, device="cpu", model=tag, ks=(1,), pooling="mean")
    assert card.note in found.method and [row.encoder for row in found.results][:2] == ["one", "untrained"]


def test_the_statistics_of_a_name_are_those_of_all_its_weights(plain):
    """timm's vit_small_patch16_224 has weights of two kinds of normalisation, and vit_tiny_patch16_224 of one."""
    weights = Weights(plain / "one.pth")
    assert weights.statistics(NAME)[0] == ((0.5,) * 3, (0.5,) * 3)
    assert weights.statistics("vit_small_patch16_224")[0] is None
    assert weights.statistics("vit_small_patch16_224.dino")[0][0] == pytest.approx((0.485, 0.456, 0.406))
    given = {"init": str(plain / "one.pth"), "model": "vit_small_patch16_224"}
    found, why = Start(request("x", {"name": "mae"}, given)).normalization(3)
    assert found is None and why.endswith("and timm's weights of vit_small_patch16_224 differ in these")


def test_names_that_do_not_match_are_reported(plain, tmp_path, shallow):
    state = load_file(plain / "one.safetensors")
    again = {name.replace("blocks.0", "blocks.1"): value.clone() for name, value in state.items() if "blocks" in name}
    save_file({name: value for name, value in state.items() if name != "norm.bias"}, tmp_path / "less.safetensors")
    save_file(state | again, tmp_path / "more.safetensors")
    save_file({"layer.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    for source, model, said in (
        (plain / "one.pth", None, "holds weights alone.*--model vit_small_patch16_224"),
        (plain / "one.pth", "vit_tny", "timm has no model called vit_tny"),
        (plain / "one.pth", f"{NAME}.nonsense", f"no weights called {NAME}.nonsense: it has {NAME}.augreg"),
        (f"timm:{NAME}.nonsense", None, f"no weights called {NAME}.nonsense: it has {NAME}.augreg"),
        (tmp_path / "less.safetensors", NAME, "17 of the 18 weights .* lacks norm"),
        (tmp_path / "more.safetensors", NAME, "18 of the 18 weights match, and it also has blocks.1."),
        (tmp_path / "other.safetensors", NAME, "its names are like layer.weight, and timm's, like blocks.0"),
    ):
        assert re.search(said, refusal(load_encoder, source, model))


def test_a_model_name_is_only_for_bare_weights(small_run):
    for source in (small_run("mae"), f"timm:{NAME}"):
        assert "--model is for a file of weights alone" in refusal(load_encoder, source, NAME)


def test_a_run_starts_from_bare_weights_with_a_model_name(plain, unlabelled_images, tmp_path, capsys):
    task = {"name": "mae", "decoder_width": 32, "decoder_depth": 1}
    given = SMALL | {"model": {"name": NAME, "depth": 1}, "patch_size": "auto", "epochs": 0.4}
    pretrain(unlabelled_images, task, init=str(plain / "one.pth"), out=tmp_path / "run", **given)
    told = " ".join(capsys.readouterr().out.split())
    assert f"patch_size 16 (as in timm's {NAME})" in told and f"positions learned (as in timm's {NAME})" in told
    assert "18 matched, 0 missing, 2 unexpected, 1 resampled" in told
    assert f"normalization init (timm's for {NAME}: mean 0.5, 0.5, 0.5; standard deviation 0.5, 0.5, 0.5)" in told


@pytest.mark.parametrize("task", ["extrema", "lut", "latent", "loca"])
def test_a_run_with_a_teacher_has_both(small_run, interrupted, task):
    run = small_run(task)
    (student, card), (teacher, its) = (load_encoder(run, network=which) for which in ("student", "teacher"))
    trained = load_task(run).task
    assert same(student, trained.encoder) and same(student, load_encoder(run)[0])
    assert same(teacher, trained.teacher_modules()["encoder"]) and not same(teacher, student)
    assert same(teacher, load_encoder(run / "teacher" / "encoder.safetensors")[0])  # for other verbs
    assert (card.name, its.name) == (task, f"{task} (teacher)") and its.trained_on == card.trained_on
    assert its.mean == card.mean and has_teacher(run)
    stopped = interrupted(task)
    again, card = load_encoder(stopped, network="teacher")
    assert same(again, teacher) and card.name.endswith(") (teacher)") and has_teacher(stopped)
    for use in ("pooling", "stem"):
        mine, theirs = (load_extra_module(run, use, which) for which in ("student", "teacher"))
        assert (mine is None) == (theirs is None) == (task != "extrema")
        if mine is not None:
            assert not same(mine, theirs) and same(theirs, load_extra_module(stopped, use, "teacher"))


def test_a_run_without_a_teacher_says_so(small_run, images):
    run = small_run("mae")
    assert not (run / "teacher").exists() and not has_teacher(run)
    for source in (run, "timm:vit_tiny_patch16_224"):
        assert "has no teacher: leave out --network" in refusal(load_encoder, source, network="teacher")
    for protocol in ("positions", "ensemble"):
        assert "leave out --network" in refusal(evaluate, protocol, run, images, network="student")


@pytest.fixture
def run(small_run, tmp_path):
    return shutil.copytree(small_run("extrema"), tmp_path / "copied")


def test_student_and_teacher_are_evaluated_and_told_apart(run, images):
    options = {"device": "cpu", "ks": (5,), "pooling": "mean"}
    student, teacher = (evaluate("knn", run, images, network=which, **options) for which in ("student", "teacher"))
    alone = evaluate("knn", run / "teacher", images, **options)
    assert [row.encoder for row in teacher.results[:2]] == ["copied (teacher)", "untrained"]
    assert teacher.results[0].outcomes.values.tolist() == alone.results[0].outcomes.values.tolist()
    assert "network" not in student.results[0].settings
    assert {row.settings["network"] for row in teacher.results} == {"teacher"}
    assert {"copied", "copied (teacher)"} <= {one.encoder for one in store.load(run)}
    assert "teacher" in report(run).read_text("utf-8").partition("kNN")[2]
    assert "--blend is of the student" in refusal(evaluate, "knn", run, images, network="teacher", blend=0.5)


def test_features_before_the_last_norm(run, images):
    (vit, card), source = load_encoder(run), open_data(images).train
    torch.nn.init.normal_(vit.norm.weight)
    plain = extract(without_last_norm(vit), card, source, device="cpu")
    given = torch.randn(2, len(card.mean), *card.own_spec.img_size)
    tokens = encode(vit, all_patches(given, patch_count(vit)), norm=False)
    assert torch.allclose(without_last_norm(vit).forward_features(given), tokens, atol=1e-5)
    normed = extract(vit, card, source, device="cpu")
    assert not torch.allclose(plain.tokens["mean"], normed.tokens["mean"], atol=1e-3)
    found = evaluate("knn", run, images, last_norm=False, device="cpu", pooling="mean", ks=(5,))
    assert found.results[0].settings["last_norm"] is False


VERBS = {
    "load_encoder": lambda source, images, out: load_encoder(source),
    "evaluate": lambda source, images, out: evaluate("knn", source, images, device="cpu", ks=(1,)),
    "look": lambda source, images, out: patchloom.look(source, images, what="attention", images=1, out=out / "look"),
    "embed": lambda source, images, out: patchloom.embed(source, images, to=out / "vectors.npz"),
    "export": lambda source, images, out: export(source, out=out / "timm.safetensors"),
    # on images of one class, which need no evaluation
    "init": lambda source, images, out: pretrain(images / "a", "mae", init=source, out=out / "init", **OPEN),
    "features_of": lambda source, images, out: pretrain(
        images / "a", {"name": "distill", "features_of": str(source)}, out=out / "distilled", **SMALL | {"epochs": 0.4}
    ),
}


@pytest.fixture(scope="module")
def sources(small_run, tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("sources")
    run = shutil.copytree(small_run("mae"), folder / "run")
    export(run, to="hf", out=folder / "exported")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).save_pretrained(folder / "dinov2")
    return {"run": run, "file": run / "encoder.safetensors", "timm": folder / "exported", "hf": folder / "dinov2"}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["run", "file", "timm", "hf"])
def test_every_verb_takes_every_kind(verb, kind, sources, images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert VERBS[verb](sources[kind], images, tmp_path) is not None


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_with_the_same_message(verb, images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"layer.weight": torch.zeros(3)}, tmp_path / "other.pth")
    (tmp_path / "empty").mkdir()
    for source, said in {
        tmp_path / "nothing": f"there is no encoder at {tmp_path}/nothing",
        tmp_path / "empty": f"there is no encoder at {tmp_path}/empty",
        tmp_path / "other.pth": "other.pth holds weights alone",
    }.items():
        if (verb, source.name) == ("init", "other.pth"):  # which may go into a model that the user names
            said = "its names are like layer.weight, and timm's"
        assert said in refusal(VERBS[verb], source, images, tmp_path)
