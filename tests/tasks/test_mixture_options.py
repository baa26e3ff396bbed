"""Mixtures that make no sense, and mixtures on the command line."""

import pytest
from mixing import make

from patchloom.data.augment import TwoViews
from patchloom.errors import PatchloomError
from patchloom.options import parse_pretrain
from patchloom.tasks.mixture import Mixture

REFUSED = [
    ({"withhold": {"masks": 0.5}}, "--task.withhold has no entry masks: choose among mask, blank"),
    ({"ask": {"pixel": 1.0}}, "--task.ask has no entry pixel: choose among pixels, positions, agreement, features"),
    ({"teacher": "own"}, "--task.teacher cannot be own"),
    ({"ask": {}}, "--task.ask needs one question or more"),
    ({"ask": {"pixels": 0.0}}, "each with a weight above 0"),
    ({"ask": {"pixels": 1.0, "positions": -1.0}}, "each with a weight above 0"),
    ({"withhold": {"mask": 1.0}, "ask": {"pixels": 1.0}}, "withhold mask must be a fraction between 0 and 1, not 1.0"),
    (
        {"withhold": {"blank": 0.0}, "ask": {"pixels": 1.0}},
        "withhold blank must be a fraction between 0 and 1",
    ),
    ({"withhold": {"drop_positions": 1.5}}, "withhold drop_positions must be a fraction between 0 and 1, not 1.5"),
    ({"withhold": {"limit_context": -0.5}}, "withhold limit_context must be a fraction between 0 and 1"),
    ({"withhold": {"blur": 3, "fisheye": 0.2}, "ask": {"pixels": 1.0}}, "one degradation of the image at a time"),
    ({"withhold": {"limit_context": 0.5, "mask": 0.5}, "ask": {"pixels": 1.0}}, "put it after mask"),
    ({"withhold": {"drop_positions": 0.5}, "ask": {"pixels": 1.0}}, "no pixels are withheld"),
    ({"withhold": {}, "ask": {"pixels": 1.0}}, "no pixels are withheld"),
    ({"withhold": {"mask": 0.5}, "ask": {"positions": 1.0}}, "no visible patch's position is withheld"),
    (
        {"withhold": {"drop_positions": 1}, "ask": {"positions": 1.0}, "positions": "sincos"},
        "drop_positions 1 does not go with an encoder that has positions: use --positions none",
    ),
    (
        {"withhold": {"drop_positions": 0.5}, "ask": {"positions": 1.0}, "positions": "none"},
        "drop_positions 0.5 does not go with an encoder that has no positions: use --positions sincos",
    ),
    ({"ask": {"agreement": 1.0}, "teacher": "none"}, "agreement needs a whole view"),
    ({"ask": {"pixels": 1.0}, "teacher": "same"}, "the teacher is not used"),
    ({"withhold": {}, "ask": {"agreement": 1.0}}, "the student sees all that the teacher sees"),
    ({"withhold": {"mask": 0.999}, "ask": {"pixels": 1.0}}, "mask ratio of 0.999 leaves 0 of 64 patches visible"),
    (
        {"withhold": {"blank": 0.6, "drop_positions": 0.5}, "ask": {"positions": 1.0}},
        "of 64 patches that enter, 39 would be blank and 32 without a position",
    ),
    ({"withhold": {"blank": 0.99}, "ask": {"pixels": 1.0}}, "every patch would be blank"),
    ({"withhold": {"mask": 1e-9}, "ask": {"pixels": 1.0}}, "mask 1e-09 takes none of the patches: raise it"),
    ({"withhold": {"blank": 1e-9}, "ask": {"pixels": 1.0}}, "blank 1e-09 takes none of the patches"),
    (
        {"withhold": {"drop_positions": 1e-9}, "ask": {"positions": 1.0}},
        "drop_positions 1e-09 takes none of the patches",
    ),
    ({"decoder_depth": 0}, "the encoder learns nothing from them: give --task.decoder_depth 1 or more"),
    ({"withhold": {"blur": 4}, "ask": {"pixels": 1.0}}, "the kernel of blur must be odd sides"),
    ({"withhold": {"zoom_in": 2}, "ask": {"pixels": 1.0}}, "the scale of zoom_in must be"),
    (
        {"withhold": {"decolorize": 0.3}, "ask": {"pixels": 1.0}, "channels": 1},
        "decolorize is for images of 3 channels",
    ),
    ({"ask": {"agreement": 1.0}, "momentum": 2.0}, "momentum must lie in"),
    ({"momentum": 0.9}, "momentum has no effect here, because --task.ask has no agreement"),
    ({"sigma": -1.0}, "sigma must be 0 or more"),
    ({"size": (8, 8), "p": 1}, "within patches of one pixel"),
    ({"withhold": {"mask": "half"}}, "--task.withhold cannot be .*: it takes names with numbers"),
    ({"ask": ["pixels"]}, "--task.ask cannot be"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_impossible_mixtures_are_rejected_with_the_reason(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


def test_from_the_command_line(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "data: shapes\n"
        "task:\n  name: mixture\n"
        "  withhold: {mask: 0.25, drop_positions: 0.5, limit_context: 0.5}\n"
        "  ask:\n    positions: 1\n    agreement: 0.5\n"
        "  teacher: second\n"
    )
    asked = {"positions": 1.0, "agreement": 0.5}
    given, _ = parse_pretrain(["--config", str(file)])
    assert list(given["task"]["withhold"].items()) == [("mask", 0.25), ("drop_positions", 0.5), ("limit_context", 0.5)]
    assert list(given["task"]["ask"].items()) == list(asked.items())  # the first question is reported
    given, _ = parse_pretrain(["--config", str(file), "--task.withhold", "{drop_positions: 0.75, blank: 0.2}"])
    assert given["task"]["withhold"] == {"drop_positions": 0.75, "blank": 0.2} and given["task"]["ask"] == asked
    task = make(**{name: value for name, value in given["task"].items() if name != "name"})
    assert isinstance(task, Mixture) and task.counts == {"drop_positions": 48, "blank": 13}
    assert task.question_weights == asked and isinstance(task.augment, TwoViews)
    for typed in ("{mask: 0.5}", "{mask:0.5}", '{"mask":0.5}'):
        given, _ = parse_pretrain(["shapes", "--task", "mixture", "--task.withhold", typed])
        assert given["task"]["withhold"] == {"mask": 0.5} and given["task"]["ask"] == "auto"
    with pytest.raises(PatchloomError, match="--task.withhold cannot be mask: it takes names with numbers"):
        parse_pretrain(["shapes", "--task", "mixture", "--task.withhold", "mask"])
