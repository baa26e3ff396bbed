"""Quick check whether a host answers, and which faults of a network may pass.

The libraries retry for more than a minute.
"""

from __future__ import annotations

import errno
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from urllib.parse import urlsplit

from huggingface_hub import constants

from patchloom.errors import PatchloomError, TemporaryError

ANSWERS_WITHIN = 2.0  # seconds
_why = [""]  # reasons for using only the cache


def why_offline() -> str:
    """Return the reason why nothing can be fetched from the hub; "" if it accepts a connection."""
    if constants.HF_HUB_OFFLINE:
        return _why[-1] or "HF_HUB_OFFLINE is set"
    return f"{urlsplit(constants.ENDPOINT).hostname} does not answer" if why_unreachable(constants.ENDPOINT) else ""


def why_unreachable(url: str) -> str:
    """Return the reason why the host of a URL, or the proxy to it, cannot be reached; "" if it accepts a connection.

    It has `ANSWERS_WITHIN` seconds.
    """
    try:
        server = urlsplit(url)
    except ValueError:
        return "the address is not valid"
    try:
        host, port = server.hostname or "", server.port or {"http": 80}.get(server.scheme, 443)
    except ValueError:
        return f"the address of {server.hostname} has no valid port"
    proxy = urllib.request.getproxies().get(server.scheme, "")
    if proxy and not urllib.request.proxy_bypass(host):
        through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host, port = through.hostname or "", through.port or 80
    found: list[str] = []

    def ask() -> None:
        try:
            socket.create_connection((host, port), ANSWERS_WITHIN).close()
            found.append("")
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
            named = isinstance(error, OSError) and not isinstance(error, socket.gaierror)
            refused = f"{host}:{port} refuses connections" if was_refused(error) else f"{host}:{port} does not answer"
            found.append(refused if named else f"the name {host} is not resolved")

    asking = Thread(target=ask, daemon=True)  # looking up a name has no time limit
    asking.start()
    asking.join(ANSWERS_WITHIN)
    return found[0] if found else f"{host}:{port} does not answer"


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


# Faults that may pass by themselves. Each file system and client has its own exceptions: those of optional packages are
# recognised by the name of a class.
_STATES = (408, 425, 429)  # of HTTP, besides 500 and above
_ERRNOS = {
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT),
    *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.EADDRINUSE),
}
_CLASSES = {
    *("ClientConnectorError", "ServerDisconnectedError", "ClientPayloadError"),  # aiohttp
    *("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError"),  # botocore
    *("ConnectError", "ConnectTimeout", "ReadTimeout", "RemoteProtocolError"),  # httpx
    "ConnectionError",  # requests
}


def network_error(text: str, error: BaseException | None = None) -> PatchloomError:
    """Return the error with this message: a `TemporaryError` if what was asked of a network may work later.

    A host without a name and an answer such as 403 or 404 do not pass.

    Args:
        text: message.
        error: the exception behind it; None: the hub does not answer (`why_offline`).
    """
    passes = not constants.HF_HUB_OFFLINE if error is None else _may_pass(error)
    return TemporaryError(text) if passes else PatchloomError(text)


def _may_pass(error: BaseException) -> bool:
    """Return whether an exception, or one behind it, is a temporary fault of a network."""
    if constants.HF_HUB_OFFLINE and any(kind.__name__ == "OfflineModeIsEnabled" for kind in type(error).__mro__):
        return False
    for one in (chain := _chain(error)):
        if isinstance(one, TemporaryError):
            return True
        if isinstance(one, socket.gaierror):
            return one.errno == socket.EAI_AGAIN
        if (status := http_status(one)) is not None:
            return status >= 500 or status in _STATES
    return any(
        isinstance(found, TimeoutError | ConnectionError)
        or (isinstance(found, OSError) and found.errno in _ERRNOS)
        or not {kind.__name__ for kind in type(found).__mro__}.isdisjoint(_CLASSES)
        for found in chain
    )


def was_refused(error: BaseException) -> bool:
    """Return whether an exception, or one behind it, is a refused connection: the host is there, and no server."""
    return any(isinstance(one, OSError) and one.errno == errno.ECONNREFUSED for one in _chain(error))


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception and those behind it."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or one.__context__
    return chain


def http_status(error: BaseException) -> int | None:
    """Return the state of an HTTP answer, from the attributes that clients give their exceptions."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # botocore's
        answer = answer.get("ResponseMetadata")
        found = answer.get("HTTPStatusCode") if isinstance(answer, dict) else None
    else:
        found = getattr(answer, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
    return found if isinstance(found, int) and 400 <= found < 600 else None
