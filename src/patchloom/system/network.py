"""Quick check whether a hub of weights answers: the libraries retry for more than a minute."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from urllib.parse import urlsplit

from huggingface_hub import constants

ANSWERS_WITHIN = 2.0  # seconds
_why = [""]  # reasons for using only the cache


def why_offline() -> str:
    """Return the reason why nothing can be fetched from the hub; "" if it accepts a connection."""
    if constants.HF_HUB_OFFLINE:
        return _why[-1] or "HF_HUB_OFFLINE is set"
    hub = urlsplit(constants.ENDPOINT)
    host, port = hub.hostname or "", hub.port or {"http": 80}.get(hub.scheme, 443)
    proxy = urllib.request.getproxies().get(hub.scheme, "")
    if proxy and not urllib.request.proxy_bypass(host):
        through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host, port = through.hostname or "", through.port or 80
    return "" if accepts_connections(host, port) else f"{host} does not answer"


def accepts_connections(host: str, port: int) -> bool:
    """Return whether a connection is made within `ANSWERS_WITHIN` seconds, including the look-up of the name."""
    found: list[bool] = []

    def ask() -> None:
        try:
            socket.create_connection((host, port), ANSWERS_WITHIN).close()
            found.append(True)
        except (OSError, UnicodeError):  # UnicodeError: a name that no host can have
            found.append(False)

    asking = Thread(target=ask, daemon=True)  # looking up a name has no time limit
    asking.start()
    asking.join(ANSWERS_WITHIN)
    return found == [True]


@contextmanager
def from_cache_alone(alone: bool, why: str = "") -> Iterator[None]:
    """If ``alone``, make the hub's library use only its cache inside this block, and fail at once without a file."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or alone
    _why.append("" if before else why)
    try:
        yield
    finally:
        _why.pop()
        constants.HF_HUB_OFFLINE = before
