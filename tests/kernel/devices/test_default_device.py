"""With ``torch.set_default_device("cuda")`` in a training, aiofeed's host tensors are still on the host."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aiofeed import DecodeImage, Feeder, Tensors
from aiofeed.kernel.devices.backend import TorchBackend


@pytest.fixture(autouse=True)
def another_default() -> Iterator[None]:
    """Make "meta" the default device: it exists everywhere and has no values, so wrongly placed tensors are noticed."""
    with torch.device("meta"):
        yield


class Numbers:
    """A source of 24 numbers with numpy targets."""

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
    """Resident data are permuted on the host."""
    x = torch.from_numpy(np.arange(24))
    seen = [row for [batch] in Feeder(Tensors(x), batch_size=8, shuffle=shuffle) for row in batch.tolist()]
    assert sorted(seen) == list(range(24))


def test_a_resident_cache() -> None:
    """Cached samples and their targets are on the host."""

    def decode(index: int) -> np.ndarray:
        return np.full(2, index, np.float32)

    with Feeder(Numbers(), decode=decode, batch_size=8, shuffle=True, cache="device") as feeder:
        for _ in range(3):
            for rows, targets in feeder:
                assert rows[:, 0].tolist() == targets.tolist()


def test_calling_a_decoder_directly() -> None:
    """A decoder that is called directly returns host tensors and uses the given generator."""
    image = io.BytesIO()
    Image.new("RGB", (40, 30)).save(image, "JPEG")
    decode = DecodeImage(8, crop="random", flip=True)
    assert decode(image.getvalue(), rng=torch.Generator()).device.type == "cpu"


def test_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """``pin`` asks torch for host memory."""
    asked = []

    def empty(*size: int, device: Any = None, **options: Any) -> torch.Tensor:
        asked.append(device)
        return torch.from_numpy(np.zeros(size, np.uint8))

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(RuntimeError, match="pageable"):
        TorchBackend(torch.device("xpu", 0)).pin(8)
    assert asked == ["cpu"]
