"""``Tokens`` with ``cache="device"``: the tokens are copied to the device once, and batches are gathered there."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import aiofeed
from aiofeed import DiskCache, Feeder, HostCache, Limits, Mixture, Tokens
from aiofeed.errors import CacheError, DeviceCopyError
from aiofeed.resident import device_windows
from aiofeed.tokens import formats, windows
from tests.support.simulated_device import SimulatedDevice
from tests.support.token_files import write_header, write_raw

BLOCK = 8
NUMBERS = np.arange(500) * 101 % 60_000


@pytest.fixture(params=["late", "random", "early"])
def device(request: pytest.FixtureRequest) -> SimulatedDevice:
    """A device that runs its work late, early or in random order."""
    return SimulatedDevice(latency=request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 500 tokens."""
    return write_raw(tmp_path / "train.bin", NUMBERS)


def lists(feeder: Any) -> list[Any]:
    """The batches as lists of numbers."""
    return [[part.tolist() for part in batch] for batch in feeder]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": "keyed"}, {"sampler": [3, 1, 60, 3]}])
@pytest.mark.parametrize("targets", [False, True])
def test_batches_equal_those_of_the_files(
    options: dict[str, Any], targets: bool, device: SimulatedDevice, path: Path
) -> None:
    """Over epochs, batches have the bytes, dtype and structure that they have without the cache."""
    source = Tokens(path, BLOCK, stride=5, targets=targets)
    there: Feeder[Any] = Feeder(source, batch_size=6, device=device, cache="device", **options)
    here: Feeder[Any] = Feeder(source, batch_size=6, device=None, **options)
    for _ in range(3):
        for found, expected in zip(there, here, strict=True):
            assert type(found) is list if targets else isinstance(found, torch.Tensor)
            for part, wanted in zip(found if targets else [found], expected if targets else [expected], strict=True):
                assert part.is_contiguous()
                assert part.dtype == torch.int64
                assert torch.equal(part.cpu(), wanted)


def test_tokens_are_copied_once(path: Path) -> None:
    """Epochs after the first copy one list of positions per window of batches, and no tokens."""
    device = SimulatedDevice()
    feeder: Feeder[Any] = Feeder(
        Tokens(path, BLOCK), batch_size=6, shuffle=True, device=device, cache="device", transform=lambda batch: batch
    )
    list(feeder)
    assert device.copies == 2
    assert NUMBERS.size * 2 <= device.allocated_bytes < NUMBERS.size * 8
    for _ in range(5):
        list(feeder)
    assert device.copies <= 1 + 7  # one window is made ahead
    del feeder
    gc.collect()
    device.synchronize()
    assert device.allocated_bytes == 0


@pytest.mark.parametrize("upload_bytes", [1, 256, 1 << 20])
def test_files_of_several_dtypes(
    upload_bytes: int, device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of other dtypes, strides and formats, copied in pieces, give the values of their tokens."""
    monkeypatch.setattr(device_windows, "UPLOAD_BYTES", upload_bytes)
    wide = np.array([0, 1, 2**31, 2**32 - 1] * 15)
    np.save(tmp_path / "c.npy", NUMBERS[:80].astype(">u2"))
    a = Tokens(write_header(tmp_path / "a.bin", NUMBERS[:77]), BLOCK, stride=3)
    b = Tokens(write_raw(tmp_path / "b.bin", wide, "uint32"), BLOCK, "uint32", stride=11)
    source = a.joined([b, Tokens(tmp_path / "c.npy", BLOCK)])
    feeder: Feeder[Any] = Feeder(source, batch_size=7, shuffle=True, device=device, cache="device")
    assert lists(feeder) == lists(Feeder(source, batch_size=7, shuffle=True, device=None))


@pytest.mark.parametrize("dtype", formats.DTYPES)
def test_dtypes(dtype: str, device: SimulatedDevice, tmp_path: Path) -> None:
    """Tokens of every integer dtype arrive with their values."""
    numbers = np.array([0, 1, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
    source = Tokens(write_raw(tmp_path / "train.bin", numbers, dtype), 4, dtype=dtype)
    assert lists(Feeder(source, batch_size=1, device=device, cache="device")) == [[numbers.tolist()]]


def test_big_endian_tokens(device: SimulatedDevice, tmp_path: Path) -> None:
    """A file in the other byte order gives its values."""
    np.save(tmp_path / "train.npy", NUMBERS.astype(">u2"))
    feeder: Feeder[Any] = Feeder(Tokens(tmp_path / "train.npy", 500), batch_size=1, device=device, cache="device")
    assert lists(feeder) == [[NUMBERS.tolist()]]


def test_a_kept_batch_is_never_overwritten(device: SimulatedDevice, path: Path) -> None:
    """Batches that the user keeps or changes stay as they are, with windows of one batch, too."""
    source = Tokens(path, BLOCK, targets=True)
    feeder: Feeder[Any] = Feeder(
        source, batch_size=6, device=device, cache="device", limits=Limits(memory_bytes=1 << 10)
    )
    kept = list(feeder)
    kept[0][0].zero_()
    list(feeder)
    assert lists(kept[1:]) == lists(Feeder(source, batch_size=6, device=None))[1:]


# --- order and state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(12))
def test_resume_at_every_position(position: int, device: SimulatedDevice, path: Path) -> None:
    """A state saved after any batch goes on with the next one, from the device to the files and back."""
    options: dict[str, Any] = {"batch_size": 6, "shuffle": True}
    resident = options | {"device": device, "cache": "device"}
    expected: Feeder[Any] = Feeder(Tokens(path, BLOCK), **options)
    whole = lists(expected) + lists(expected)
    for first, second in ((resident, options), (options, resident)):
        feeder: Feeder[Any] = Feeder(Tokens(path, BLOCK), **first)
        for _ in islice(feeder, position):
            pass
        resumed: Feeder[Any] = Feeder(Tokens(path, BLOCK), **second)
        resumed.load_state_dict(json.loads(json.dumps(feeder.state_dict())))
        rest = lists(resumed) + (lists(resumed) if position < len(expected) else [])
        assert rest == whole[position:]


def test_resume_with_another_number_of_ranks(path: Path) -> None:
    """Three ranks go on with the windows that two have not returned."""
    seen: list[list[int]] = []
    state: dict[str, Any] = {}
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "cache": "device"}
    for rank in range(2):
        feeder: Feeder[Any] = Feeder(Tokens(path, BLOCK), shard=(rank, 2), device=SimulatedDevice(), **options)
        for batch in islice(feeder, 3):
            seen += batch.tolist()
        state = feeder.state_dict()
    for rank in range(3):
        feeder = Feeder(Tokens(path, BLOCK), shard=(rank, 3), device=SimulatedDevice(), **options)
        feeder.load_state_dict(state)
        seen += sum(lists(feeder), [])
    windows = [NUMBERS[at : at + BLOCK].tolist() for at in range(0, 493, BLOCK)]
    assert len(seen) == len(windows) + 1  # one is repeated, because 3 does not divide the other 38
    assert set(map(tuple, seen)) == set(map(tuple, windows))


def test_breaks_and_errors(device: SimulatedDevice, path: Path) -> None:
    """After a break or an error in the loop the saved state goes on with the next batch."""
    feeder: Feeder[Any] = Feeder(Tokens(path, BLOCK), batch_size=6, device=device, cache="device")
    expected = lists(Feeder(Tokens(path, BLOCK), batch_size=6))
    for number in range(3):
        with pytest.raises(ZeroDivisionError):
            for _ in feeder:
                1 / 0  # noqa: B018
        feeder.load_state_dict(feeder.state_dict())
        assert next(iter(feeder)).tolist() == expected[1], number
        feeder.set_epoch(0)
    feeder.close()
    assert lists(feeder) == expected


def test_async_for_and_many_epochs(path: Path) -> None:
    """``async for`` over a hundred epochs gives the batches of ``for``, and device memory does not grow."""
    device = SimulatedDevice(latency="early")
    options: dict[str, Any] = {"batch_size": 40, "shuffle": True}
    feeder: Feeder[Any] = Feeder(Tokens(path, BLOCK), device=device, cache="device", **options)
    expected: Feeder[Any] = Feeder(Tokens(path, BLOCK), **options)

    async def check() -> None:
        reserved = 0
        for number in range(100):
            found = [batch.tolist() async for batch in feeder]
            assert found == lists(expected)
            if number == 10:
                reserved = device.reserved_bytes
        assert device.reserved_bytes <= 2 * reserved

    asyncio.run(check())


def test_a_mixture_of_tokens(device: SimulatedDevice, tmp_path: Path) -> None:
    """Windows of several sources come in their proportions."""
    web = Tokens(write_raw(tmp_path / "web.bin", np.full(800, 1)), BLOCK)
    code = Tokens(write_raw(tmp_path / "code.bin", np.full(400, 2), "uint32"), BLOCK, "uint32", stride=4)
    mixture = Mixture({"web": web, "code": code}, weights={"web": 3, "code": 1}, until=80)
    feeder: Feeder[Any] = Feeder(mixture, batch_size=8, shuffle=True, device=device, cache="device")
    for batch in feeder:
        assert batch.tolist().count([1] * BLOCK) == 6
    assert feeder.statistics().by_source == {"web": 60, "code": 20}


@pytest.mark.parametrize(
    "options",
    [{"on_error": "skip"}, {"in_order": False}, {"in_order": "samples"}, {"drop_last": True}, {"shuffle": "window"}],
)
def test_other_options(options: dict[str, Any], device: SimulatedDevice, path: Path) -> None:
    """Options that concern reading or order give what they give without the cache."""
    feeder: Feeder[Any] = Feeder(Tokens(path, BLOCK), batch_size=6, device=device, cache="device", **options)
    expected = lists(Feeder(Tokens(path, BLOCK), batch_size=6, **options))
    assert lists(feeder) == expected
    if "shuffle" not in options:
        assert lists(feeder.steps(4)) == expected[:4]


@pytest.mark.skipif(sys.platform == "win32", reason="needs Unix sockets")
def test_served_tokens(path: Path, tmp_path: Path) -> None:
    """Other processes can attach to a feeder of resident tokens."""
    address = str(tmp_path / "feed.sock")
    feeder: Feeder[Any] = Feeder(Tokens(path, BLOCK), batch_size=6, cache="device")
    with feeder, aiofeed.serve(feeder, address), aiofeed.attach(address) as feed:
        assert lists(feed) == lists(Feeder(Tokens(path, BLOCK), batch_size=6))


# --- memory and errors ------------------------------------------------------------------------------------------------


def test_tokens_that_do_not_fit(path: Path) -> None:
    """Tokens that do not fit on the device are an error with the bytes needed and free, before the first batch."""
    device = SimulatedDevice(memory_bytes=1000)
    feeder: Feeder[Any] = Feeder(Tokens(path, BLOCK), batch_size=1, device=device, cache="device")
    with pytest.raises(DeviceCopyError, match=r"on simulated:0, which has 1000 bytes free .* take 1000 bytes"):
        next(iter(feeder))
    with pytest.raises(DeviceCopyError, match="Without cache= batches are gathered from the files"):
        next(iter(feeder))


@pytest.mark.parametrize("number", range(1, 9))
def test_an_allocation_that_fails(number: int, path: Path) -> None:
    """An allocation that fails is an error, or gives smaller windows; the next iterator then works."""
    device = SimulatedDevice(allocation_fails_at=number)
    feeder: Feeder[Any] = Feeder(Tokens(path, BLOCK, targets=True), batch_size=6, device=device, cache="device")
    expected = lists(Feeder(Tokens(path, BLOCK, targets=True), batch_size=6))
    seen: list[Any] = []
    with suppress(DeviceCopyError):
        seen = lists(feeder)
    assert seen in ([], expected)
    assert lists(feeder) == expected


def test_in_host_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device the files must fit into memory, where the consumer's thread gathers them."""
    feeder: Feeder[Any] = Feeder(Tokens(path, BLOCK), batch_size=6, cache="device")
    assert lists(feeder) == lists(Feeder(Tokens(path, BLOCK), batch_size=6))
    monkeypatch.setattr(windows, "free_memory", lambda: 1500)
    with pytest.raises(CacheError, match=r"1000 bytes are more than half of the free .* leave out cache="):
        Feeder(Tokens(path, BLOCK), batch_size=6, cache="device")
    device = SimulatedDevice()
    assert lists(Feeder(Tokens(path, BLOCK), batch_size=6, cache="device", device=device)) == lists(feeder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collate_fn": default_collate}, "^collate_fn= is not possible with cache=.device."),
        ({"engine": "process:2"}, "^engine=.process:2. is not possible"),
        ({"static_batches": True, "drop_last": True}, "^static_batches=True is not possible"),
        ({"device": [SimulatedDevice(), SimulatedDevice()]}, "^a list of devices is not possible"),
        ({"batch_size": None, "batch_sampler": [[0, 1], [2]]}, "^batch_sampler= is not possible"),
    ],
)
def test_options_that_exclude_it(options: dict[str, Any], message: str, path: Path) -> None:
    """Options under which batches are not gathered on one device are refused."""
    with pytest.raises(ValueError, match=message):
        Feeder(Tokens(path, BLOCK), **{"batch_size": 4, "cache": "device"} | options)


@pytest.mark.parametrize("cache", ["host", HostCache(1 << 20), DiskCache("unused")])
def test_other_caches(cache: Any, path: Path) -> None:
    """Caches of decoded samples are refused, and the error names the one that is possible."""
    with pytest.raises(TypeError, match='decoded already: leave it out, or pass cache="device"'):
        Feeder(Tokens(path, BLOCK), batch_size=4, cache=cache)
