"""Layers, fine-tuning and pictures have the start of a run as a control."""

import pytest
import torch
from killing import SMALL

from patchloom.evaluate.protocols import evaluate
from patchloom.export.export import export
from patchloom.look.look import named_encoder, starting_encoder
from patchloom.nets.build import build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.runs.folder import RunFolder
from patchloom.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("quick_probe")

SHORT = {name: value for name, value in SMALL.items() if name not in ("model", "img_size", "patch_size")}
SHORT |= {"epochs": 1, "blr": 0.05}
MEAN, STD = (0.3, 0.4, 0.5), (0.1, 0.2, 0.3)


@pytest.fixture(scope="module")
def weights(images, tmp_path_factory):
    """File of a random encoder with its own statistics."""
    run = pretrain(images, "mae", out=tmp_path_factory.mktemp("first") / "run", **SMALL | {"epochs": 1}).folder
    spec = RunFolder(run).read_config().encoder_spec()
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("weights") / "public.safetensors"
    save_encoder(build_encoder(spec), EncoderCard(spec, MEAN, STD, "mae", "public"), path)
    return str(path)


@pytest.fixture(scope="module")
def adapted(images, weights, tmp_path_factory):
    return pretrain(images, "mae", out=tmp_path_factory.mktemp("a") / "run", init=weights, normalization="data",
                    **SHORT).folder  # fmt: skip


def rows_of(report, name):
    return [(row.pooling, row.value, str(row.settings)) for row in report.rows if row.encoder == name]


def test_the_row_of_the_start_is_that_of_its_file(adapted, weights, images, tmp_path):
    protocol = "layers"
    more = {"out": tmp_path / "layers.png"} if protocol == "layers" else {}
    beside = evaluate(protocol, adapted, images, **more)
    direct = evaluate(protocol, weights, images, **more)
    assert rows_of(beside, "start") == rows_of(direct, "public") != []
    assert beside.against[0].control == "start"
    assert rows_of(beside, "untrained") and rows_of(beside, "raw pixels")


def test_fine_tuning_stands_beside_the_start(adapted, weights, images, capsys):
    """Trained from the file itself, with its normalisation, not that of the run."""
    short = {"epochs": 1, "warmup_epochs": 0, "batch_size": 16}
    beside = evaluate("finetune", adapted, images, **short)
    direct = evaluate("finetune", weights, images, control=False, out=str(adapted.parent / "c.safetensors"), **short)
    assert [row.encoder for row in beside.quoted] == ["run", "start"]
    assert beside.quoted[1].right.tolist() == direct.quoted[0].right.tolist()
    assert "with their own normalisation" in beside.protocol
    alone = evaluate("finetune", adapted, images, from_scratch=True, **short)
    assert [row.encoder for row in alone.quoted] == ["from scratch"]


def test_pictures_have_the_start_as_the_first_control(adapted):
    encoder = named_encoder(str(adapted), None, None, torch.device("cpu"))
    (start,) = starting_encoder(adapted, encoder, torch.device("cpu"))
    assert (start.name, start.card.mean) == ("start", MEAN)


def test_the_licence_of_the_weights_holds_for_the_exported_start(adapted):
    pytest.importorskip("transformers")
    before = RunFolder(adapted).read_config().weights_before[0]
    done = export(adapted, to="hf", start=True)
    assert done.weights.name == "start-hf" and f"The licence of {before}" in " ".join(done.notes)
