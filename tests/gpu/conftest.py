from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def exact() -> Iterator[None]:
    """Disable TF32 for products and convolutions."""
    places = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = False
    yield
    for place, allowed in zip(places, before, strict=True):
        place.allow_tf32 = allowed
