"""Tests of the options of look: pictures, blocks, points and encoders."""

from pathlib import Path

import pytest
import torch

from patchloom.errors import PatchloomError
from patchloom.look import look
from patchloom.look.context import LookRequest, NamedEncoder
from patchloom.look.look import (
    PICTURES,
    disambiguate_encoders,
    draw_pictures,
    named_encoder,
    parse_blocks,
    parse_pictures,
    parse_points,
    untrained_encoder,
)
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.nets.encode import grid_size, input_size

SPEC = EncoderSpec("nano", (32, 48), 8, 3, "sincos", {"embed_dim": 16, "depth": 3, "num_heads": 2})
CARD = EncoderCard(SPEC, (0.5,) * 3, (0.25,) * 3, "mae", "photos-mae")
CPU = torch.device("cpu")


def test_names_of_pictures():
    assert (
        parse_pictures("attention, depth") == ["attention", "depth"] == parse_pictures(["attention", "depth", "depth"])
    )
    assert parse_pictures("depth,all") == ["task", *PICTURES]
    with pytest.raises(PatchloomError, match="--what atention: there is no such picture; did you mean attention"):
        parse_pictures("atention")
    with pytest.raises(PatchloomError, match="no such picture: choose from task, attention, .* or all"):
        parse_pictures("xyz")


def test_every_picture_can_be_imported():
    for place in PICTURES.values():
        module, _, function = place.rpartition(".")
        assert callable(getattr(look.import_module(module), function))


def test_numbers_of_blocks():
    vit = build_encoder(SPEC)
    assert parse_blocks(None, vit) is None
    assert parse_blocks("3,1", vit) == (1, 3) == parse_blocks([1, 3], vit)
    assert parse_blocks(2, vit) == (2,)
    for wrong in ("0", "4", "1,x", "", [], "-1"):
        with pytest.raises(PatchloomError, match="--blocks takes numbers from 1 to 3, such as 1,3, not"):
            parse_blocks(wrong, vit)


def test_a_place_is_within_the_image():
    assert parse_points("47.5,31", (32, 48)) == ((47.5, 31),) and parse_points(None, (32, 48)) == ()
    assert parse_points([0, 0], (32, 48)) == ((0, 0),)
    assert parse_points("1,2; 3,4", (32, 48), 4) == parse_points([1, 2, 3, 4], (32, 48), 4) == ((1, 2), (3, 4))
    with pytest.raises(PatchloomError, match="2 points: give one, or only --what attention --heads mean"):
        parse_points("1,2;3,4", (32, 48))
    with pytest.raises(PatchloomError, match="3 points: give 2 or fewer"):
        parse_points("1,2;3,4;5,6", (32, 48), 2)
    for wrong in ("48,0", "0,32", "-1,0", "7", "1,2,3", "a,b", "nan,0", ";"):
        with pytest.raises(PatchloomError, match="x,y in pixels of the encoder's input, 48 wide and 32 high"):
            parse_points(wrong, (32, 48))


def test_an_encoder_at_another_size_keeps_its_weights(tmp_path):
    vit = build_encoder(SPEC)
    save_encoder(vit, CARD, tmp_path / "encoder.safetensors")
    found = named_encoder(tmp_path / "encoder.safetensors", None, (64, 32), CPU)
    assert input_size(found.vit) == (64, 32) and grid_size(found.vit) == (8, 4)
    assert torch.equal(found.vit.patch_embed.proj.weight, vit.patch_embed.proj.weight)
    twin = untrained_encoder(found, 0, CPU)
    assert twin.name == "untrained" and input_size(twin.vit) == (64, 32)
    assert not torch.equal(twin.vit.patch_embed.proj.weight, vit.patch_embed.proj.weight)
    with pytest.raises(PatchloomError, match="patches of 8 pixels do not divide images of 30x32"):
        named_encoder(tmp_path / "encoder.safetensors", None, (30, 32), CPU)


def test_what_makes_no_sense_is_left_out_of_all_and_refused_alone(tmp_path, monkeypatch, capsys):
    def draw(asked):
        raise PatchloomError("it is a Swin")

    monkeypatch.setattr(look, "PICTURES", {"no": f"{__name__}.draw", "yes": f"{__name__}.well"})
    monkeypatch.setattr(look, "import_module", lambda name: type("m", (), {"draw": draw, "well": lambda asked: [1]}))
    asked = LookRequest(NamedEncoder("one", build_encoder(SPEC), CARD), source=None, folder=tmp_path)
    assert draw_pictures(["no", "yes"], asked, lenient=True) == [1]
    assert capsys.readouterr().err == "no is left out: it is a Swin\n"
    with pytest.raises(PatchloomError, match="it is a Swin"):
        draw_pictures(["no", "yes"], asked, lenient=False)


def test_encoders_of_one_name_are_named_by_their_places():
    places = "runs/a/mae", "runs/b/mae", "runs/mp3", "runs/untrained/"
    given = [NamedEncoder(Path(place).name, build_encoder(SPEC), CARD) for place in places]
    assert [one.name for one in disambiguate_encoders(places, given)] == [
        "runs/a/mae",
        "runs/b/mae",
        "mp3",
        "runs/untrained",
    ]
    with pytest.raises(PatchloomError, match="runs/mp3 is given twice: give each encoder once"):
        disambiguate_encoders([*places, "runs/mp3/"], [*given, given[2]])
