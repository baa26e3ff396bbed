"""Without a network, patchloom does not wait: the libraries would retry for more than a minute."""

import errno
import socket
import time

import pytest
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
    def hang(*_):  # a resolver that does not answer has no time limit
        time.sleep(20)
        raise OSError

    monkeypatch.setattr(network.socket, "create_connection", hang)
    monkeypatch.setattr(network, "ANSWERS_WITHIN", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    before = time.perf_counter()
    with pytest.raises(PatchloomError, match=f"huggingface.co does not answer.*timm/{NAME} .* --model {NAME}"):
        load_encoder_file(f"timm:{NAME}")
    assert time.perf_counter() - before < 10 and not constants.HF_HUB_OFFLINE  # as it was


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


def answer(status):
    error = Exception("no answer")
    error.status = status
    return error


class EndpointConnectionError(Exception):
    """Error with the name of botocore's."""


def behind(error):
    outer = ValueError("it failed")
    outer.__cause__ = error
    return outer


PASS = [answer(status) for status in (408, 429, 500, 503)] + [behind(answer(503)), TimeoutError()]
PASS += [ConnectionRefusedError(), OSError(errno.EHOSTUNREACH, "no route"), socket.gaierror(socket.EAI_AGAIN, "later")]
PASS += [EndpointConnectionError(), behind(EndpointConnectionError()), None]  # None: the hub does not answer
STAY = [answer(status) for status in (401, 403, 404)] + [behind(answer(404)), ValueError("damaged")]
STAY += [socket.gaierror(socket.EAI_NONAME, "no name"), FileNotFoundError(errno.ENOENT, "no file")]


@pytest.mark.parametrize(
    ("error", "passes"), [*((one, True) for one in PASS), *((one, False) for one in STAY)], ids=repr
)
def test_which_faults_of_a_network_may_pass(error, passes, monkeypatch):
    assert isinstance(network.network_error("it failed", error), TemporaryError) == passes
    if error is None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # switched off on purpose
        assert type(network.network_error("it failed")) is PatchloomError
