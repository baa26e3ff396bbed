"""Processes of several machines, or of one, meet before they train: told in a line, for a limited time, and stoppable.

torch itself would wait for half an hour without a word, and where no signal is heard.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from patchloom.errors import PatchloomError
from patchloom.waiting import Waiting

PORT = "29500"  # torch's own, where several machines are told no other
_MINUTES = 10.0  # that everybody has to come; PATCHLOOM_RENDEZVOUS says others, in seconds
_LOOK = 0.2  # seconds between two looks
_QUIET = 2.0  # seconds after which it is said what is waited for
_HELLO = 20.0  # seconds for a connection to somebody who is there


def meet(address: str, port: int, rank: int, world: int, machines: int, backend: str, **more: Any) -> None:
    """Wait for all processes, and make them a group.

    Args:
        address, port: where the first process can be reached.
        rank: the number of this one.
        world: how many there are.
        machines: on which they are.
        backend: of torch.distributed.
        more: for `torch.distributed.init_process_group`.

    Raises:
        PatchloomError: not all of them came in time.
        RuntimeError: the port is taken, or the first process went away.
    """
    seconds = _seconds()
    end = time.monotonic() + seconds
    # of the processes of a machine one speaks; with a single machine they are there in a moment
    said = time.monotonic() + _QUIET if machines > 1 and os.environ.get("LOCAL_RANK", "0") == "0" else 0.0
    place, store, here = f"{address}:{port}", None, 0
    if rank == 0:
        store = TCPStore(address, port, world, True, timedelta(seconds=_HELLO), wait_for_workers=False)
    what = "other processes" if rank == 0 else "first process"
    with Waiting(f"waiting for the {what} at {place}"):
        while here < world:
            if store is None and _answers(address, port):
                store = TCPStore(address, port, world, False, timedelta(seconds=_HELLO), wait_for_workers=False)
            if store is not None:
                here = store.add("here", 0 if here else 1)
            if here >= world:
                break
            if time.monotonic() > end:
                raise PatchloomError(_late(place, here, world, machines, seconds))
            if said and time.monotonic() > said:
                print(_line(place, rank, here, world, machines, seconds), flush=True)
                said = 0.0
            time.sleep(_LOOK)
    store.set_timeout(dist.default_pg_timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **more)
    if backend == "nccl":
        atexit.register(_part)  # which it wants, and says so if it is not done


def _part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _seconds() -> float:
    text = os.environ.get("PATCHLOOM_RENDEZVOUS", "")
    try:
        seconds = float(text) if text else 60 * _MINUTES
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 7 * 86400:
        raise PatchloomError(f"PATCHLOOM_RENDEZVOUS must be seconds above 0 and below a week, not {text}")
    return seconds


def _line(place: str, rank: int, here: int, world: int, machines: int, seconds: float) -> str:
    limit = f"at most {_span(seconds)}"
    if rank:
        return f"Waiting for the first process at {place}, {limit}."
    return f"Waiting at {place} for {world - here} of {world} processes, {limit}. {_how(place, machines)}"


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:g} seconds"


def _how(place: str, machines: int) -> str:
    address, _, port = place.rpartition(":")
    if address in ("127.0.0.1", "localhost"):
        address = socket.gethostname()
    ranks = "1" if machines == 2 else f"1 to {machines - 1}"
    return f"Each other machine runs the same command with NODE_RANK={ranks} MASTER_ADDR={address} MASTER_PORT={port}."


def _late(place: str, here: int, world: int, machines: int, seconds: float) -> str:
    came = f"{here} of {world} processes came" if here else "the first process did not come"
    told = f"{came} to {place} within {_span(seconds)}"
    if machines == 1:
        return f"{told}: see what was printed before this, and run the same command again"
    return f"{told}: run the same command on each of the {machines} machines (docs/devices.md), or leave out --nodes"


class Meeting:
    """For a strategy of Fabric: its processes `meet`, instead of waiting in torch."""

    def setup_environment(self: Any) -> None:
        """What the strategy does, once all are there."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # of torchrun, which has seen to it
            self.accelerator.setup_device(self.root_device)
            self._set_world_ranks()
            environment, backend = self.cluster_environment, self._get_process_group_backend()
            place = environment.main_address, environment.main_port
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place[0], str(place[1])
            ranks = environment.global_rank(), environment.world_size()
            device = None if self.root_device.type == "cpu" else self.root_device
            meet(*place, *ranks, self.num_nodes, backend, timeout=self._timeout, device_id=device)
        super().setup_environment()
