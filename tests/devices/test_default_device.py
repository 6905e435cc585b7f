"""``torch.set_default_device("cuda")`` in a training: what aiofeed makes on the host stays there."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aiofeed import DecodeImage, Feeder, Tensors
from aiofeed.devices.backend import TorchBackend


@pytest.fixture(autouse=True)
def another_default() -> Iterator[None]:
    """A device that every machine has, and that has no values: whatever is made there by mistake shows."""
    with torch.device("meta"):
        yield


class Numbers:
    """A source of 24 numbers with targets of numpy's."""

    def __len__(self) -> int:
        return 24

    def key(self, index: int) -> str:
        return str(index)

    async def read(self, index: int) -> int:
        return index

    def target(self, index: int) -> np.float32:
        return np.float32(index)


@pytest.mark.parametrize("shuffle", [False, True, "keyed"])
def test_tensors(shuffle: Any) -> None:
    """Data in memory are permuted in the thread whose default it is."""
    x = torch.from_numpy(np.arange(24))
    seen = [row for [batch] in Feeder(Tensors(x), batch_size=8, shuffle=shuffle) for row in batch.tolist()]
    assert sorted(seen) == list(range(24))


def test_a_cache_where_batches_are_wanted() -> None:
    """So are decoded samples and their targets."""

    def decode(index: int) -> np.ndarray:
        return np.full(2, index, np.float32)

    with Feeder(Numbers(), decode=decode, batch_size=8, shuffle=True, cache="device") as feeder:
        for _ in range(3):
            for rows, targets in feeder:
                assert rows[:, 0].tolist() == targets.tolist()


def test_a_decoder_that_is_called_by_hand() -> None:
    """Its random numbers come from the generator that it is given."""
    image = io.BytesIO()
    Image.new("RGB", (40, 30)).save(image, "JPEG")
    decode = DecodeImage(8, crop="random", flip=True)
    assert decode(image.getvalue(), rng=torch.Generator()).device.type == "cpu"


def test_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the host's: torch locks no other."""
    asked = []

    def empty(*size: int, device: Any = None, **options: Any) -> torch.Tensor:
        asked.append(device)
        return torch.from_numpy(np.zeros(size, np.uint8))

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(RuntimeError, match="pageable"):
        TorchBackend(torch.device("xpu", 0)).pin(8)
    assert asked == ["cpu"]
