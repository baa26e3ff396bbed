"""A bare loss, a module that is no `Task`, as a task."""

import pytest
import torch
from killing import SMALL
from refusing import refusal
from running import killed, weights
from safetensors.torch import load_file

import patchloom
from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.runs.task import load_task
from patchloom.tasks import task_class, task_name, with_defaults
from patchloom.train.checkpointing import TrainState
from patchloom.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("quick_probe")

LOSS = """
import torch
from torch import nn

class Turns(nn.Module):
    def __init__(self, encoder, hidden: int = 8):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Sequential(nn.Linear(encoder.embed_dim, hidden), nn.GELU(), nn.Linear(hidden, 2))

    def forward(self, images, generator=None):
        way = torch.randint(2, (len(images),), generator=generator).to(images.device)
        turned = torch.where(way[:, None, None, None] == 1, images.flip(2), images)
        return nn.functional.cross_entropy(self.head(self.encoder.forward_features(turned)[:, 0]), way)
"""


@pytest.fixture
def turns(tmp_path):
    (tmp_path / "turns.py").write_text(LOSS)
    return f"{tmp_path / 'turns.py'}:Turns"


def test_a_bare_loss_is_trained_resumed_and_evaluated_without_a_measure(images, turns, tmp_path, monkeypatch, capsys):
    given = SMALL | {"epochs": 2, "task": {"name": turns, "hidden": 4}}
    del given["held_out"]
    run = pretrain(images, out=tmp_path / "whole" / "run", **given)
    assert run.summary.startswith("Trained with a bare loss, which has no measure: there is no verdict.")
    assert "Turns is a bare loss, so nothing is measured" in capsys.readouterr().out
    names = weights(run.folder)
    assert "loss.head.0.weight" in names and "encoder.cls_token" in names
    assert not [name for name in names if "loss.encoder" in name], "each weight is stored once"
    assert not (run.folder / "pictures").exists() and not (run.folder / "verdict.yaml").exists()
    cut = tmp_path / "cut" / "run"
    killed(monkeypatch, TrainState, "count", 4, images, out=cut, **given)
    pretrain(images, out=cut, **given)
    assert weights(cut) == names
    assert (cut / "encoder.safetensors").read_bytes() == (run.folder / "encoder.safetensors").read_bytes()
    assert load_task(run.folder).task.loss.encoder is not None
    vit, card = patchloom.load_encoder(run)
    assert torch.equal(vit.cls_token, load_file(run.folder / "encoder.safetensors")["cls_token"])
    assert "without a measure on held-out images" in refusal(pretrain, images, held_out=0.2, out=cut, **given)


def test_a_bare_loss_is_computed_as_by_itself(turns):
    name = task_name(turns)
    assert with_defaults({"name": name})["hidden"] == 8
    assert "no option --task.width" in refusal(with_defaults, {"name": name, "width": 3})
    torch.manual_seed(0)
    task = task_class(name)(build_encoder(EncoderSpec("nano", (32, 32), 8, options={"embed_dim": 32, "depth": 1})))
    images = torch.randn(6, 3, 32, 32)
    first, again = (torch.Generator().manual_seed(1) for _ in range(2))
    assert torch.equal(task(images, generator=first, progress=0.5).loss, task.loss(images, generator=again))
    task.loss.forward = lambda images: images
    task.passed = []
    with pytest.raises(PatchloomError, match=r"Turns returned a tensor \(6, 3, 32, 32\)"):
        task(images)


def test_modules_that_are_no_loss_are_refused(tmp_path):
    (tmp_path / "it.py").write_text(
        "from torch import nn\nclass Deep(nn.Module):\n    def __init__(self, encoder):\n        super().__init__()\n"
        "        self.inside = nn.Sequential(encoder)\n    def forward(self, images):\n        return images.sum()\n"
    )
    encoder = build_encoder(EncoderSpec("nano", (32, 32), 8, options={"embed_dim": 32, "depth": 1}))
    assert "keeps the encoder inside another module" in refusal(
        task_class(task_name(f"{tmp_path / 'it.py'}:Deep")), encoder
    )
    assert "is not a pretext task" in refusal(task_name, torch.optim.AdamW)
