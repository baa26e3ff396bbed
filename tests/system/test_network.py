"""Without a network, patchloom does not wait: the libraries would retry for more than a minute."""

import errno
import socket
import time

import pytest
import timm
from huggingface_hub import constants

from patchloom.errors import PatchloomError, TemporaryError
from patchloom.nets.checkpoints.format import load_encoder_file
from patchloom.system import network

NAME = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_a_name_that_is_not_resolved_takes_seconds(monkeypatch, tmp_path):
    """A resolver that does not answer has no time limit."""

    def looks_up(*_):
        time.sleep(30)
        raise OSError

    monkeypatch.setattr(network.socket, "create_connection", looks_up)
    monkeypatch.setattr(network, "ANSWERS_WITHIN", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    before = time.perf_counter()
    with pytest.raises(PatchloomError) as refused:
        load_encoder_file(f"timm:{NAME}")
    assert time.perf_counter() - before < 10
    said = str(refused.value)
    assert (
        "could not be fetched (huggingface.co does not answer): check the network, or fetch model.safetensors" in said
    )
    assert f"of timm/{NAME} elsewhere, and give that file with --model {NAME} instead" in said
    assert not constants.HF_HUB_OFFLINE  # as it was


def test_reasons_for_an_unreachable_hub(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        assert network.why_offline() == ""
        monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
        assert network.why_offline() == "hub.invalid does not answer"
        assert network.why_unreachable("https://hub.invalid") == "the name hub.invalid is not resolved"
        assert network.why_unreachable("http://user:secret@host:none") == "the address of host has no valid port"
        assert network.why_unreachable("http://user:secret@[::1") == "the address is not valid"
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")  # a proxy, through which the hub may be reachable
        assert network.why_offline() == ""
    assert network.why_unreachable(f"http://127.0.0.1:{port}") == f"127.0.0.1:{port} refuses connections"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert network.why_offline() == "HF_HUB_OFFLINE is set"


def test_the_cache_is_used_offline(monkeypatch):
    """timm is still called, restricted to its cache."""
    create, seen = timm.create_model, []

    def made(name, pretrained=False, **more):
        if pretrained:
            seen.append(constants.HF_HUB_OFFLINE)
        return create(name, **more)

    monkeypatch.setattr(timm, "create_model", made)
    for offline in ("nobody answers", ""):
        monkeypatch.setattr("patchloom.nets.checkpoints.format.why_offline", lambda said=offline: said)
        assert load_encoder_file(f"timm:{NAME}")[1].timm_name == NAME
    assert seen == [True, False]


class Answer(Exception):
    """Error of an HTTP client with the state of an answer."""

    def __init__(self, status):
        self.status = status


class EndpointConnectionError(Exception):
    """Error with the name of botocore's."""


def behind(error):
    """Return an error that was raised because of ``error``."""
    outer = ValueError("it failed")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        *((Answer(status), True) for status in (408, 429, 500, 503)),
        *((Answer(status), False) for status in (401, 403, 404)),
        *((behind(Answer(503)), True), (behind(Answer(404)), False)),
        *((TimeoutError(), True), (ConnectionRefusedError(), True), (OSError(errno.EHOSTUNREACH, "no route"), True)),
        *((socket.gaierror(socket.EAI_AGAIN, "later"), True), (socket.gaierror(socket.EAI_NONAME, "no name"), False)),
        *((EndpointConnectionError(), True), (behind(EndpointConnectionError()), True)),
        *((FileNotFoundError(errno.ENOENT, "no file"), False), (ValueError("damaged"), False)),
    ],
    ids=repr,
)
def test_which_faults_of_a_network_may_pass(error, passes):
    assert network.may_pass(error) == passes
    assert isinstance(network.network_error("it failed", error), TemporaryError) == passes


def test_a_hub_that_does_not_answer_may_pass_but_not_one_that_is_switched_off(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert type(network.network_error("no answer")) is TemporaryError
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert type(network.network_error("no answer")) is PatchloomError
