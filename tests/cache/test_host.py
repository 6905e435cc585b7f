"""``cache=`` with decoders: batches do not depend on the cache, and a cached sample is not read again."""

from __future__ import annotations

import logging
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiofeed import DecodeImage, DiskCache, FailurePolicy, Feeder, Files, HostCache, ImageFolder, Limits, Tensors
from aiofeed.errors import CacheError, DecodeError
from aiofeed.kernel.decoders.geometry import map_box
from tests.support.number_decoders import CountedNumbers, array, half, scalar, tensor


class Split:
    """A random decoder with separate methods for decoding and augmentation."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"Split({self.kind!r})"

    def __call__(self, data: bytes, *, rng: torch.Generator) -> Any:
        return self.augment(self.decode_cached(data), rng=rng)

    def decode_cached(self, data: bytes) -> Any:
        return array(data) if self.kind == "array" else tensor(data)

    def augment(self, cached: Any, *, rng: torch.Generator) -> dict[str, Any]:
        return {"cached": cached + 0, "drawn": torch.rand(3, generator=rng)}


def cache_of(kind: str, folder: Path) -> Any:
    return "host" if kind == "host" else DiskCache(folder / "samples.cache")


def flat(batches: Any) -> list[Any]:
    """The contents of batches, comparable by ``==``."""
    if isinstance(batches, torch.Tensor):
        return [str(batches.dtype), list(batches.shape), list(batches.stride()), batches.flatten().tolist()]
    if isinstance(batches, np.ndarray):
        return [str(batches.dtype), batches.tolist()]
    if isinstance(batches, dict):
        return [(name, flat(value)) for name, value in batches.items()]
    if isinstance(batches, list | tuple):
        return [flat(value) for value in batches]
    return [batches]


def epochs(feeder: Feeder[Any], count: int = 3) -> list[Any]:
    with feeder:
        return [flat(list(feeder)) for _ in range(count)]


KINDS = pytest.mark.parametrize("kind", ["host", "disk"])


@KINDS
@pytest.mark.parametrize("decode", [tensor, half, array, scalar, Split("array"), Split("tensor")])
@pytest.mark.parametrize("collated", [False, True])
@pytest.mark.parametrize("target", [None, lambda index: -index])
def test_batches_equal_those_without_a_cache(
    decode: Any, kind: str, collated: bool, target: Any, tmp_path: Path
) -> None:
    """This holds in every epoch, and each sample is read once."""
    arguments: dict[str, Any] = {"decode": decode, "batch_size": 4, "shuffle": True, "seed": 3}
    if collated:
        arguments["collate_fn"] = list
    source = CountedNumbers(target=target)
    expected = epochs(Feeder(CountedNumbers(target=target), **arguments))
    assert epochs(Feeder(source, cache=cache_of(kind, tmp_path), **arguments)) == expected
    assert source.reads == Counter(range(22))


@KINDS
@pytest.mark.parametrize(
    "decode",
    [
        DecodeImage(24),
        DecodeImage((20, 30)),
        DecodeImage(24, resize=30),
        DecodeImage(24, flip=True),
        DecodeImage((20, 30), flip=True, scaled=False),
    ],
    ids=str,
)
def test_pictures_without_a_random_crop_are_bit_for_bit_those_without_a_cache(
    decode: DecodeImage, kind: str, jpeg_folder: Path, tmp_path: Path
) -> None:
    for collate_fn in (None, list):
        arguments: dict[str, Any] = {"decode": decode, "batch_size": 5, "shuffle": True, "collate_fn": collate_fn}
        source = ImageFolder(jpeg_folder)
        expected = epochs(Feeder(source, **arguments))
        assert epochs(Feeder(source, cache=cache_of(kind, tmp_path), **arguments)) == expected


@KINDS
@pytest.mark.parametrize("collated", [False, True])
def test_random_crops_do_not_depend_on_whether_the_cache_was_warm(
    kind: str, collated: bool, jpeg_folder: Path, tmp_path: Path
) -> None:
    """An epoch is the same with a cold cache, with a warm one, and with one that has no room for all."""
    arguments: dict[str, Any] = {
        "decode": DecodeImage(24, crop="random", flip=True),
        "batch_size": 5,
        "shuffle": True,
        "collate_fn": list if collated else None,
    }
    source = ImageFolder(jpeg_folder)
    with Feeder(source, cache=cache_of(kind, tmp_path), **arguments) as feeder:
        cold = flat(list(feeder))
        other = flat(list(feeder))
        feeder.set_epoch(0)
        assert flat(list(feeder)) == cold
    assert other != cold
    assert epochs(Feeder(source, cache=HostCache(1), **arguments), 2) == [cold, other]
    # Room for some of the samples.
    row = DecodeImage(24, crop="random").cached_row.shape[0]
    assert epochs(Feeder(source, cache=HostCache(10 * row), **arguments), 2) == [cold, other]


def test_random_crops_show_what_they_show_without_a_cache(jpeg_folder: Path) -> None:
    """A cached crop shows the same part of the picture, a little softer."""
    source = ImageFolder(jpeg_folder)
    for size in (24, (20, 30)):
        arguments: dict[str, Any] = {"batch_size": 36, "seed": 5}
        decode = DecodeImage(size, crop="random", flip=True, scale=(0.3, 1.0), cached_size=64)
        [(plain, _)] = Feeder(source, decode=decode, **arguments)
        [(cached, _)] = Feeder(source, decode=decode, cache="host", **arguments)
        error = (plain.float() - cached.float()).abs().mean((1, 2, 3))
        other = (plain.float() - cached.roll(1, 0).float()).abs().mean((1, 2, 3))
        assert error.max() < 6
        assert other.mean() > 20


@given(
    original=st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    cached=st.tuples(st.integers(1, 500), st.integers(1, 500)),
    seed=st.integers(0, 2**64 - 1),
)
def test_boxes_stay_inside_the_cached_picture(original: tuple[int, int], cached: tuple[int, int], seed: int) -> None:
    box = DecodeImage(8, crop="random").view(*original, seed).box
    left, upper, right, lower = map_box(box, original, cached)
    assert 0 <= left < right <= cached[0]
    assert 0 <= upper < lower <= cached[1]
    assert left / cached[0] == pytest.approx(box[0] / original[0])


@settings(max_examples=20)
@given(
    pixels=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    cached=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_picture_can_be_cached_and_cropped(pixels: tuple[int, int], cached: tuple[int, int], seed: int) -> None:
    """Augmentation reads only the rows it needs, and gives what reading all rows gives."""
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    image = Image.fromarray(np.random.default_rng(seed % 1000).integers(0, 256, (*pixels, 3), dtype=np.uint8))
    image.save(file, "PNG")
    decode = DecodeImage((7, 9), crop="random", flip=True, cached_size=cached)
    row = np.empty(decode.cached_row.shape, np.uint8)
    decode.decode_cached_into(file.getvalue(), row)
    out = np.empty(decode.row.shape, np.uint8)
    decode.augment_into(row, out, seed)
    whole = Image.fromarray(np.asarray(image.resize(cached[::-1], Image.Resampling.BILINEAR)))
    view = decode.view(pixels[1], pixels[0], seed)
    box = map_box(view.box, pixels[::-1], cached[::-1])
    expected = np.asarray(whole.resize((9, 7), Image.Resampling.BILINEAR, box=box))
    if view.flip:
        expected = expected[:, ::-1]
    # The box within some of the rows may differ in the last bit of a float.
    assert np.abs(out.astype(int) - expected).max() <= 1


@KINDS
@pytest.mark.parametrize("threads", [1, 3])
def test_resuming_with_and_without_a_warm_cache(kind: str, threads: int, jpeg_folder: Path, tmp_path: Path) -> None:
    """A state saved with a warm cache is resumed exactly with that cache, and with cold ones."""

    def new(cache: Any) -> Feeder[Any]:
        return Feeder(
            ImageFolder(jpeg_folder),
            decode=DecodeImage(16, crop="random", flip=True),
            batch_size=4,
            shuffle=True,
            seed=1,
            cache=cache,
            limits=Limits(decode_threads=threads),
        )

    with new(cache_of(kind, tmp_path)) as feeder:
        list(feeder)
        batches = iter(feeder)
        for _ in range(3):
            next(batches)
        state = feeder.state_dict()
        rest = flat(list(batches))
    for cache in ("host", DiskCache(tmp_path / "another"), cache_of(kind, tmp_path)):
        with new(cache) as again:
            again.load_state_dict(state)
            assert flat(list(again)) == rest


@KINDS
def test_ranks_see_what_they_see_without_a_cache(kind: str, tmp_path: Path) -> None:
    source = CountedNumbers()
    for rank in range(3):
        arguments: dict[str, Any] = {"decode": tensor, "batch_size": 3, "shuffle": True, "shard": (rank, 3)}
        expected = epochs(Feeder(CountedNumbers(), **arguments), 4)
        assert epochs(Feeder(source, cache=cache_of(kind, tmp_path), **arguments), 4) == expected
    if kind == "disk":
        # Samples are read twice if they are read ahead while another batch still decodes them.
        assert source.reads.total() < 22 + 22, "ranks read samples that others have written"


@KINDS
@pytest.mark.parametrize("action", ["skip", "replace"])
@pytest.mark.parametrize("limit_s", [None, 20.0])
def test_failed_samples_are_not_cached(kind: str, action: Any, limit_s: float | None, tmp_path: Path) -> None:
    """They fail in every epoch, and batches equal those without a cache."""
    bad = frozenset({3, 4, 11, 21})
    policy = FailurePolicy(action, max_failures=0.5, decode_timeout_s=limit_s)
    arguments: dict[str, Any] = {"decode": tensor, "batch_size": 4, "shuffle": True, "on_error": policy}
    expected = epochs(Feeder(CountedNumbers(bad=bad), **arguments))
    source = CountedNumbers(bad=bad)
    feeder = Feeder(source, cache=cache_of(kind, tmp_path), **arguments)
    assert epochs(feeder) == expected
    assert feeder.statistics().failures == len(bad)
    assert all(source.reads[index] == 1 for index in set(range(22)) - bad)
    assert all(source.reads[index] >= 3 for index in bad)


class Failing(Split):
    """Its augmentation fails for one number."""

    bad = b""

    def augment(self, cached: Any, *, rng: torch.Generator) -> Any:
        if self.bad and (cached == array(self.bad)).all():
            raise ValueError
        return super().augment(cached, rng=rng)


@pytest.mark.parametrize(("missing", "cached"), [(3, 5), (5, 3)])
def test_the_first_failure_of_a_batch_is_raised(missing: int, cached: int, tmp_path: Path) -> None:
    """It is the first by position, whether decoding a missing sample or augmenting a cached one fails."""
    decode = Failing("array")
    arguments: dict[str, Any] = {"decode": decode, "batch_size": 8, "cache": DiskCache(tmp_path / "samples.cache")}
    with Feeder(CountedNumbers(8, frozenset({missing})), on_error="skip", **arguments) as feeder:
        list(feeder)
    decode.bad = b"%d" % cached
    with (
        Feeder(CountedNumbers(8, frozenset({missing})), **arguments) as feeder,
        pytest.raises(DecodeError, match="number 3"),
    ):
        list(feeder)


@KINDS
def test_raising_names_the_sample_in_every_epoch(kind: str, tmp_path: Path) -> None:
    feeder = Feeder(
        CountedNumbers(bad=frozenset({9})), decode=tensor, batch_size=4, cache=cache_of(kind, tmp_path), limits=Limits()
    )
    for _ in range(2):
        with pytest.raises(DecodeError, match="number 9") as caught:
            list(feeder)
        assert caught.value.index == 9
    feeder.close()


def test_a_target_that_fails_with_a_warm_cache_names_the_sample() -> None:
    targets = dict(enumerate(range(100)))
    source: Any = CountedNumbers()
    source.target = targets.__getitem__
    feeder = Feeder(source, decode=tensor, batch_size=4, cache="host")
    list(feeder)
    feeder.close()
    targets.clear()
    with pytest.raises(DecodeError, match="number 0"):
        list(feeder)
    feeder.close()


def test_writing_into_a_batch_does_not_change_the_cache(jpeg_folder: Path) -> None:
    for decode, source in ((DecodeImage(16), ImageFolder(jpeg_folder)), (tensor, CountedNumbers())):
        for collate_fn in (None, list):
            with Feeder(source, decode=decode, batch_size=4, cache="host", collate_fn=collate_fn) as feeder:
                seen = []
                for _ in range(3):
                    batches = list(feeder)
                    seen.append(flat(batches))
                    for batch in batches:
                        for images in [batch[0]] if collate_fn is None else [image for image, _ in batch]:
                            images.zero_()
                assert seen[0] == seen[1] == seen[2]


def test_augment_cannot_write_into_the_cache() -> None:
    """A cached array is read-only, and a tensor is a copy."""

    class Writing(Split):
        def augment(self, cached: Any, *, rng: torch.Generator) -> Any:
            cached += 1
            return cached

    with (
        Feeder(CountedNumbers(4), decode=Writing("array"), batch_size=4, cache="host") as feeder,
        pytest.raises(DecodeError, match="read-only"),
    ):
        list(feeder)
    assert epochs(Feeder(CountedNumbers(4), decode=Writing("tensor"), batch_size=4, cache="host"), 3)[2] == flat(
        [[torch.stack([tensor(b"%d" % n) + 1 for n in range(4)]), torch.arange(0, -4, -1)]]
    )


# --- limits -----------------------------------------------------------------------------------------------------------


def test_samples_that_do_not_fit_are_decoded_in_every_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """The samples decoded first are cached, and one log line says how many."""
    source = CountedNumbers()
    caplog.set_level(logging.WARNING, "aiofeed")
    cache = HostCache(max_bytes=20 * 7 + 3)
    limits = Limits(decode_threads=1)
    expected = epochs(Feeder(CountedNumbers(), decode=tensor, batch_size=4), 3)
    assert epochs(Feeder(source, decode=tensor, batch_size=4, cache=cache, limits=limits), 3) == expected
    assert [index for index in range(22) if source.reads[index] == 1] == list(range(7))
    assert [record.getMessage()[:40] for record in caplog.records] == ["the cache has room for 7 of 22 samples: "]


def test_half_of_the_free_memory_is_divided_among_the_ranks_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiofeed.kernel.runtime import machine

    monkeypatch.setattr(machine, "free_memory", lambda *_: 20 * 10 * 2 * 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    source = CountedNumbers()
    epochs(Feeder(source, decode=tensor, batch_size=4, cache="host", limits=Limits(decode_threads=1)), 2)
    assert [index for index in range(22) if source.reads[index] == 1] == list(range(10))


# --- lifetime ---------------------------------------------------------------------------------------------------------


def test_a_cache_survives_close_and_belongs_to_one_feeder() -> None:
    source, cache = CountedNumbers(), HostCache()
    feeder = Feeder(source, decode=tensor, batch_size=4, cache=cache)
    for _ in range(2):
        with feeder:
            list(feeder)
    assert source.reads == Counter(range(22))
    epochs(Feeder(source, decode=tensor, batch_size=4, cache=cache), 1)
    assert source.reads == Counter([*range(22)] * 2)


def test_memory_is_freed_with_the_feeder() -> None:
    """Batches that the user refers to do not keep the cache alive."""
    import gc
    import weakref

    feeder = Feeder(CountedNumbers(), decode=tensor, batch_size=4, cache="host")
    batches = list(feeder)
    arena = weakref.ref(feeder._config.cache._arena)  # type: ignore[union-attr]
    feeder.close()
    del feeder
    gc.collect()
    assert arena() is None
    assert len(batches) == 6


class Portable(CountedNumbers):
    def __init__(self, n: int = 22) -> None:
        super().__init__(n, target=None)


@KINDS
def test_a_pickled_feeder_starts_with_an_empty_cache(kind: str, tmp_path: Path) -> None:
    feeder = Feeder(Portable(), decode=tensor, batch_size=4, cache=cache_of(kind, tmp_path))
    first = epochs(feeder, 1)
    again = pickle.loads(pickle.dumps(feeder))
    again.set_epoch(0)
    assert len(pickle.dumps(feeder)) < 5000
    assert epochs(again, 1) == first
    assert sum(again.dataset.reads.values()) == (22 if kind == "disk" else 44)


@KINDS
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_uses_the_samples_cached_before(kind: str, tmp_path: Path) -> None:
    source = CountedNumbers()
    feeder = Feeder(source, decode=tensor, batch_size=4, cache=cache_of(kind, tmp_path))
    first = flat(list(feeder))
    pid = os.fork()
    if pid == 0:
        try:
            same = flat(list(feeder)) == first and source.reads == Counter(range(22))
            os._exit(0 if same else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert flat(list(feeder)) == first
    feeder.close()


# --- refusals ---------------------------------------------------------------------------------------------------------


def drawn(data: bytes, *, rng: torch.Generator) -> torch.Tensor:
    return torch.rand(3, generator=rng)


class Rows:
    """A random decoder of rows without a separate augmentation."""

    takes_seed = True
    row = DecodeImage(4).row

    def __call__(self, data: bytes) -> None: ...

    def decode_into(self, data: bytes, out: Any, seed: int | None = None) -> None: ...


@pytest.mark.parametrize("decode", [drawn, Rows()])
def test_a_random_decoder_without_separate_augmentation_is_refused(decode: Any) -> None:
    with pytest.raises(TypeError, match=r"decode_cached\(data\).*augment\(cached, \*, rng\)"):
        Feeder(CountedNumbers(), decode=decode, batch_size=4, cache="host")


@pytest.mark.parametrize(
    ("cache", "error"), [("gpu", TypeError), ("disk", TypeError), (True, TypeError), (5, TypeError)]
)
def test_an_argument_that_is_not_a_cache_is_refused(cache: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r'"host", "device", aiofeed\.HostCache'):
        Feeder(CountedNumbers(), decode=tensor, batch_size=4, cache=cache)


def test_tensors_in_memory_are_refused() -> None:
    with pytest.raises(TypeError, match="leave it out"):
        Feeder(Tensors(torch.zeros(3)), batch_size=4, cache="host")


def test_worker_processes_cannot_use_host_memory() -> None:
    with pytest.raises(ValueError, match=r"DiskCache\(path\)"):
        Feeder(Files([]), decode=tensor, batch_size=4, cache="host", engine="process")


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("kind", [HostCache, lambda max_bytes: DiskCache("x", max_bytes)])
def test_limits_are_checked(kind: Any, value: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        kind(max_bytes=value)
    for wrong in (1.5, "1", True):
        with pytest.raises(TypeError, match="must be an int"):
            kind(max_bytes=wrong)
    with pytest.raises(TypeError, match="path"):
        DiskCache(5)  # type: ignore[arg-type]


@KINDS
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_sample_that_cannot_be_cached_is_an_error_that_names_it(kind: str, on_error: Any, tmp_path: Path) -> None:
    """The error is raised with every policy, since the decoder cannot be used with a cache."""

    def decode(data: bytes) -> Any:
        return tensor(data) if int(data) < 10 else {"image": object()}

    cache = cache_of(kind, tmp_path)
    feeder = Feeder(CountedNumbers(), decode=decode, batch_size=4, cache=cache, on_error=on_error)
    with feeder, pytest.raises(CacheError, match=r"number 1\d.*item\['image'\] is a object.*or leave cache= out"):
        list(feeder)


def test_cached_size_needs_random_crops() -> None:
    assert DecodeImage(224, crop="random").cached_row.shape == (280 * 280 * 3 + 8,)
    assert DecodeImage(224, crop="random", cached_size=(30, 40)).cached_row.shape == (30 * 40 * 3 + 8,)
    with pytest.raises(ValueError, match="random"):
        DecodeImage(224, cached_size=300)
    with pytest.raises(ValueError, match="height in cached_size"):
        DecodeImage(224, crop="random", cached_size=(0, 300))
