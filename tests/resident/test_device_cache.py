"""``cache="device"`` with decoders: the first epoch streams, later ones are views of permuted rows."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import DecodeImage, FailurePolicy, Feeder, Files, Tensors
from aiofeed.cache.layout import Layout
from aiofeed.errors import CacheError, DeviceCopyError
from aiofeed.kernel.devices.backend import CpuBackend
from aiofeed.kernel.feeder.pipeline import StreamingPipeline
from aiofeed.resident.device_cache import DeviceStore
from aiofeed.resident.device_windows import DeviceWindows
from aiofeed.resident.pipeline import ResidentPipeline
from tests.support.dropping import python_calls_while_dropping
from tests.support.number_decoders import CountedNumbers, array, half, scalar, tensor
from tests.support.simulated_device import SimulatedDevice

LATENCIES = ("random", "late", "early")


def wide(data: bytes) -> torch.Tensor:
    return torch.full((2,), complex(int(data), 1), dtype=torch.complex128)


def len_of(data: bytes) -> torch.Tensor:
    return torch.tensor([len(data)])


class Planar:
    """A decoder of rows whose dimensions are in another order than the user sees."""

    from aiofeed.kernel.core.types import Row

    row = Row((2, 3, 4), "uint8", (2, 0, 1))
    takes_seed = False

    def decode_into(self, data: bytes, out: np.ndarray, seed: int | None = None) -> None:
        out[...] = np.arange(24, dtype=np.uint8).reshape(2, 3, 4) + int(data)

    def __call__(self, data: bytes) -> Any:
        raise NotImplementedError


def flat(batch: Any) -> Any:
    """The contents of a batch, comparable by ``==``."""
    if isinstance(batch, torch.Tensor):
        there = batch.cpu()
        return [str(there.dtype), list(batch.shape), list(batch.stride()), there.flatten().tolist()]
    if isinstance(batch, dict):
        return [(name, flat(value)) for name, value in batch.items()]
    if isinstance(batch, list | tuple):
        return [type(batch).__name__, *[flat(value) for value in batch]]
    return batch


def device_of(kind: str | None, **options: Any) -> SimulatedDevice | None:
    return None if kind is None else SimulatedDevice(latency=kind, **options)  # type: ignore[arg-type]


DEVICES = pytest.mark.parametrize("kind", [None, *LATENCIES])
TARGETS: list[Any] = [
    None,
    lambda index: -index,
    lambda index: index / 2,
    lambda index: {"a": torch.tensor([index, 1]), "b": (index % 2 == 0, np.float32(index))},
]


@pytest.mark.parametrize("kind", [None, "random"])
@pytest.mark.parametrize("decode", [tensor, half, array, scalar, wide, Planar()])
@pytest.mark.parametrize("target", range(len(TARGETS)))
def test_batches_equal_those_without_a_cache(kind: str | None, decode: Any, target: int) -> None:
    """They are equal in bytes, dtypes, strides and structure; each sample is read once, and one to learn the layout."""
    source = CountedNumbers(target=TARGETS[target])
    options: dict[str, Any] = {"decode": decode, "batch_size": 4, "shuffle": True, "seed": 3}
    plain: Feeder[Any] = Feeder(CountedNumbers(target=TARGETS[target]), device=device_of(kind), **options)
    feeder: Feeder[Any] = Feeder(source, cache="device", device=device_of(kind), **options)
    with plain, feeder:
        for epoch in range(3):
            assert [flat(batch) for batch in feeder] == [flat(batch) for batch in plain]
            assert isinstance(feeder._session.pipeline, ResidentPipeline) == (epoch > 0)
        assert feeder.statistics().bytes_read == 0
    probes = 0 if isinstance(decode, Planar) else 1
    assert sum(source.reads.values()) == 22 + probes


@DEVICES
def test_epochs_in_a_row_become_resident(kind: str | None) -> None:
    """This includes ``epochs(n)``, which otherwise starts the next epoch early."""
    source = CountedNumbers()
    feeder: Feeder[Any] = Feeder(source, decode=tensor, batch_size=4, cache="device", device=device_of(kind))
    with feeder:
        for epoch in feeder.epochs(4):
            assert len([flat(batch) for batch in feeder]) == 6
            assert isinstance(feeder._session.pipeline, ResidentPipeline if epoch else StreamingPipeline)
        assert source.reads == Counter([*range(22), 0])


def test_a_shard_that_never_changes_is_resident_from_the_second_epoch() -> None:
    """Samples of other ranks need not be cached."""
    source = CountedNumbers(40)
    feeder: Feeder[Any] = Feeder(source, decode=tensor, batch_size=4, shard=(1, 2), cache="device")
    with feeder:
        first = [flat(batch) for batch in feeder]
        assert [flat(batch) for batch in feeder] == first
        assert isinstance(feeder._session.pipeline, ResidentPipeline)
    assert set(source.reads) == {0, *range(1, 40, 2)}


@DEVICES
@pytest.mark.parametrize("action", ["skip", "replace"])
@pytest.mark.parametrize("decode_timeout_s", [None, 30.0])
def test_samples_that_fail(kind: str | None, action: Any, decode_timeout_s: float | None) -> None:
    """They fail in every epoch as without a cache, and the others are read once."""
    policy = FailurePolicy(action, max_failures=20, decode_timeout_s=decode_timeout_s)
    options: dict[str, Any] = {"decode": tensor, "batch_size": 4, "shuffle": True, "on_error": policy}
    bad = frozenset({0, 7, 11})
    source = CountedNumbers(22, bad)
    cached: Feeder[Any] = Feeder(source, cache="device", device=device_of(kind), **options)
    plain: Feeder[Any] = Feeder(CountedNumbers(22, bad), **options)
    with cached, plain:
        first: dict[int, int] = {}
        for _ in range(4):
            assert [flat(batch) for batch in cached] == [flat(batch) for batch in plain]
            assert cached.statistics().failures == plain.statistics().failures
            good = {index: reads for index, reads in source.reads.items() if index not in bad}
            # A sample that replaces another may be read for its own batch at the same time.
            first = first or good
            assert good == first
        assert {failure.index for failure in cached.failures} == bad


@pytest.mark.parametrize("latency", LATENCIES)
def test_samples_that_do_not_fit_on_the_device_are_an_error_with_the_figures(latency: Any) -> None:
    """It comes before the first batch, also if the layout has to be learned, and no device memory stays allocated."""
    for decode in (Planar(), tensor):
        backend = SimulatedDevice(latency=latency, memory_bytes=4096)
        feeder: Feeder[Any] = Feeder(
            CountedNumbers(1000), decode=decode, batch_size=8, cache="device", device=backend, on_error="skip"
        )
        with pytest.raises(CacheError, match=r"1,000 samples of 2\d bytes .*two batches .*cache=\"host\"") as error:
            next(iter(feeder))
        assert "4.0 KiB free" in str(error.value)
        feeder.close()
        gc.collect()
        assert backend.allocated_bytes == 0


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_the_consumers_modes_do_not_affect_transform_on_a_device(mode: Any) -> None:
    """The first epoch is transformed in the copy thread, the others in the consumer's: the results are the same."""
    weight = torch.ones(5, 2, requires_grad=True)

    def transform(batch: Any) -> Any:
        return batch[0] @ weight, batch[1]

    feeder: Feeder[Any] = Feeder(
        CountedNumbers(), decode=tensor, batch_size=4, cache="device", device=SimulatedDevice(), transform=transform
    )
    with mode(), feeder:
        for _ in range(3):
            for images, _ in feeder:
                assert (images.dtype, images.requires_grad, images.is_inference()) == (torch.float32, True, False)
            assert torch.is_grad_enabled() == (mode not in (torch.no_grad, torch.inference_mode))


@pytest.mark.parametrize("decode", [Planar(), tensor])
def test_targets_that_do_not_fit_on_the_device_are_an_error_before_the_first_batch(decode: Any) -> None:
    """They are copied there after the first epoch; masks, for example, may be larger than their samples."""

    def mask(index: int) -> Any:
        if index == 0:
            raise OSError("no mask")  # the check uses the next target
        return {"mask": torch.full((16, 16), index), "area": index}

    def feed(memory_bytes: int) -> Feeder[Any]:
        backend = SimulatedDevice(memory_bytes=memory_bytes)
        return Feeder(
            CountedNumbers(100, target=mask),
            decode=decode,
            batch_size=8,
            cache="device",
            device=backend,
            on_error="skip",
        )

    with feed(64 << 10) as feeder, pytest.raises(CacheError, match=r"100 targets of 2\.0 KiB each .*cache=\"host\""):
        next(iter(feeder))
    with feed(512 << 10) as feeder:
        assert [[len(labels["area"]) for _, labels in feeder] for _ in range(2)] == [[7, *[8] * 11, 4]] * 2


def test_a_device_error_during_allocation_is_raised() -> None:
    """It is raised at the ``for`` line, and the next epoch allocates again."""
    backend = SimulatedDevice(copy_fails_at=1)
    with Feeder(CountedNumbers(), decode=tensor, batch_size=4, cache="device", device=backend) as feeder:
        with pytest.raises(DeviceCopyError, match=r"memory for the cache on simulated:0 failed.*at copy 1"):
            next(iter(feeder))
        for _ in range(2):
            assert len(list(feeder)) == 6


def test_samples_that_do_not_fit_into_host_memory_are_an_error_with_the_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a device the limit is free host memory, which the ranks of a host share."""
    monkeypatch.setattr("aiofeed.kernel.runtime.machine.free_memory", lambda *_: 1000)
    feeder: Feeder[Any] = Feeder(CountedNumbers(22), decode=tensor, batch_size=4, cache="device")
    assert len(list(feeder)) == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    other: Feeder[Any] = Feeder(CountedNumbers(22), decode=tensor, batch_size=4, cache="device")
    with pytest.raises(CacheError, match=r"2 ranks, which has 500 bytes free: 22 samples of 20 bytes"):
        next(iter(other))
    other.close()
    feeder.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": DecodeImage(8, crop="random")}, 'augmentation runs on the CPU.*cache="host"'),
        ({"decode": DecodeImage(8, flip=True)}, 'augmentation runs on the CPU.*cache="host"'),
        ({"decode": tensor, "collate_fn": list}, "collate_fn"),
        ({"decode": len_of, "engine": "process"}, 'engine="thread"'),
        ({"decode": tensor, "device": [SimulatedDevice(), SimulatedDevice(index=1)]}, "one feeder for each"),
        ({"decode": tensor, "static_batches": True, "drop_last": True}, "static_batches"),
    ],
)
def test_unsupported_arguments_are_refused_with_an_alternative(options: dict[str, Any], message: str) -> None:
    """They are refused when the feeder is made."""
    with pytest.raises(ValueError, match=message):
        Feeder(Files([__file__] * 4), batch_size=2, cache="device", **options)


def test_tensors_in_memory_are_refused() -> None:
    with pytest.raises(TypeError, match="in memory already"):
        Feeder(Tensors(torch.zeros(4)), batch_size=2, cache="device")


@DEVICES
@pytest.mark.parametrize(
    ("target", "message"),
    [
        (str, "sample 'number 0': .*item is a str, '0'; a cache stores"),
        (lambda index: index / 2 if index else 0, "item is a float, 0.5, and that of the others is int"),
    ],
)
def test_targets_that_do_not_fit_into_a_tensor_are_an_error(kind: str | None, target: Any, message: str) -> None:
    """The error names the sample in the first epoch."""
    feeder: Feeder[Any] = Feeder(
        CountedNumbers(target=target),
        decode=tensor,
        batch_size=4,
        cache="device",
        device=device_of(kind),
        on_error="skip",
    )
    with feeder, pytest.raises(CacheError, match=message):
        list(feeder)


@DEVICES
def test_samples_that_differ_are_an_error(kind: str | None) -> None:
    """The error names the sample and both shapes."""

    def decode(data: bytes) -> torch.Tensor:
        return torch.zeros(3 if data == b"9" else 2)

    feeder: Feeder[Any] = Feeder(CountedNumbers(), decode=decode, batch_size=4, cache="device", device=device_of(kind))
    with feeder, pytest.raises(CacheError, match=r"number 9.*\[2\].*\[3\]"):
        list(feeder)


def test_memory_is_freed_with_its_owner_by_a_c_function() -> None:
    """The collector may drop the owner in any thread; no Python code runs but that of the simulated device."""

    class Owner:
        pass

    backend = SimulatedDevice()
    store = DeviceStore(22, 4)
    store.attach(backend)
    store.open(Layout((3,), "float32"))
    assert store.memory[0].shape == (22, 3)
    box: list[object] = [Owner()]
    store.free_with(box[0])
    assert backend.allocated_bytes > 0
    assert set(python_calls_while_dropping(box)) <= {"BlockHandle.__del__"}
    assert backend.allocated_bytes == 0


class ModeOfAllocations(CpuBackend):
    """A CUDA device whose allocations are made on the host, in a capture mode that is recorded."""

    def __init__(self, modes: list[str]) -> None:
        super().__init__()
        self.device = torch.device("cuda", 0)
        self._modes = modes
        self.found: list[list[str]] = []

    def copy(self, tensor: torch.Tensor, /) -> torch.Tensor:
        self.found.append([*self._modes])
        return super().copy(tensor)


def test_memory_is_allocated_beside_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples' memory and the windows are allocated in the mode in which captures of other threads are ignored."""
    modes: list[str] = []

    @contextmanager
    def allocating(device: torch.device) -> Iterator[None]:
        modes.append(str(device))
        yield
        modes.pop()

    monkeypatch.setattr("aiofeed.resident.device_windows.allocating", allocating)
    backend = ModeOfAllocations(modes)
    store = DeviceStore(22, 4)
    store.attach(backend)  # type: ignore[arg-type]
    store.open(Layout((3,), "float32"))
    assert backend.found == [["cuda:0"]]
    DeviceWindows(backend, Tensors(torch.ones(4, 2)), 2, 1 << 20)  # type: ignore[arg-type]
    assert backend.found == [["cuda:0"], ["cuda:0"]]


@DEVICES
def test_epochs_of_the_same_shard_collate_and_upload_targets_once(kind: str | None) -> None:
    requested: list[int] = []

    def target(index: int) -> int:
        requested.append(index)
        return index

    feeder: Feeder[Any] = Feeder(
        CountedNumbers(target=target), decode=tensor, batch_size=4, shard=(0, 2), cache="device", device=device_of(kind)
    )
    with feeder:
        list(feeder)
        list(feeder)
        source = feeder._session.pipeline.data.source  # type: ignore[union-attr]
        list(feeder)
        assert feeder._session.pipeline.data.source is source  # type: ignore[union-attr]
    assert len(requested) == 11


@DEVICES
def test_close_waits_for_the_threads_of_the_first_epoch(kind: str | None) -> None:
    """They end when an epoch is resident; after ``close`` they have ended and the source is closed."""
    source = CountedNumbers()
    feeder: Feeder[Any] = Feeder(source, decode=tensor, batch_size=4, cache="device", device=device_of(kind))
    list(feeder)
    pipeline = feeder._session.pipeline
    list(feeder)
    assert feeder._session.pipeline is not pipeline
    feeder.close()
    assert source.opened == 0
    assert pipeline.join(0)  # type: ignore[union-attr]


def test_images_of_a_folder(tmp_path: Path) -> None:
    """Batches are in channels_last, as the decoder writes them."""
    from PIL import Image

    paths = []
    for number in range(9):
        paths.append(str(tmp_path / f"{number}.png"))
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (20, 30, 3), np.uint8)).save(paths[-1])
    options: dict[str, Any] = {"decode": DecodeImage(16), "batch_size": 4, "shuffle": True}
    for backend in (None, SimulatedDevice()):
        cached: Feeder[Any] = Feeder(Files(paths, list(range(9))), cache="device", device=backend, **options)
        with cached, Feeder(Files(paths, list(range(9))), **options) as plain:
            for _ in range(3):
                assert [flat(batch) for batch in cached] == [flat(batch) for batch in plain]
