"""Pseudo CUDA tensors compute what the CPU does, refuse what a GPU refuses, and count waits for it by place."""

import pytest
import torch
from pseudo_cuda import CUDA, Refused, pseudo_cuda

WAITS = {
    "reads": lambda x: x.sum().item(),
    "lists": lambda x: x.tolist(),
    "decides": lambda x: x + 1 if x.any() else x,
    "prints": lambda x: f"{x.sum():.2f}",
    "picks": lambda x: x[x > 0],
    "finds": lambda x: torch.where(x > 0),
    "fetches": lambda x: x.cpu(),
    "moves": lambda x: x.to("cpu", torch.float64),
    "sends": lambda x: torch.ones(4).to(x),
    "fills": lambda x: x.copy_(torch.ones(4)),
    "makes": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "indexes": lambda x: x[torch.arange(2)],
    "compares": lambda x: torch.equal(x, x),
    "stops": lambda _: torch.cuda.synchronize(),
}
REFUSED = {
    "mixes": lambda x: x + torch.ones(4),
    "reads the memory": lambda x: x.numpy(),
    "draws": lambda x: torch.rand(3, device=x.device, generator=torch.Generator()),
    "draws in place": lambda x: x.normal_(generator=torch.Generator()),
}


@pytest.mark.parametrize("what", WAITS | REFUSED)
def test_waits_are_counted_by_place_and_what_a_gpu_refuses_is_refused(what):
    with pseudo_cuda() as waits:
        x = torch.ones(4, device="cuda")
        if what in REFUSED:
            with pytest.raises(Refused):
                REFUSED[what](x)
            return
        assert not waits
        WAITS[what](x)
        assert sum(waits.values()) == 1 and "test_pseudo_cuda.py:" in next(iter(waits))


def test_nothing_else_waits_and_an_event_only_if_nothing_is_queued_behind_it():
    with pseudo_cuda() as waits:
        x = torch.ones(4).pin_memory().to("cuda", non_blocking=True)
        y = torch.where(x > 0, x * torch.tensor(2.0), x)[torch.arange(2, device=CUDA)].half().to(x)
        back, event = y.to("cpu", non_blocking=True), torch.cuda.Event()
        event.record()
        x += 1
        event.synchronize()
        assert not waits
        event.record()
        event.synchronize()
        assert sum(waits.values()) == 1
    assert type(back) is torch.Tensor and back.tolist() == [2.0, 2.0]
