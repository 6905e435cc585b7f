"""``Tokens``: windows of tokens in files, in memory and made ahead by threads."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiofeed
from aiofeed import Feeder, Mixture, Tokens
from aiofeed.errors import StateError
from tests.support.simulated_device import SimulatedDevice
from tests.support.token_files import write_header, write_megatron, write_raw

BLOCK = 8
COUNT = 500
NUMBERS = np.arange(COUNT) * 101 % 60_000

FORMATS: dict[str, Callable[[Path], Path]] = {
    "raw": lambda folder: write_raw(folder / "train.bin", NUMBERS),
    "llm.c": lambda folder: write_header(folder / "train.bin", NUMBERS),
    "llm.c, uint32": lambda folder: write_header(folder / "train.bin", NUMBERS, "uint32", magic=20240801, version=7),
    "NeMo, uint16": lambda folder: write_header(folder / "train.bin", NUMBERS, magic=278895051, bytes_per_token=2),
    "NeMo, uint32": lambda folder: write_header(
        folder / "train.bin", NUMBERS, "uint32", magic=278895051, bytes_per_token=4
    ),
    "Megatron": lambda folder: write_megatron(folder / "train.bin", np.split(NUMBERS, [7, 7, 400])),
    "Megatron, int32": lambda folder: write_megatron(folder / "train.bin", [NUMBERS], "int32"),
    ".npy": lambda folder: save_npy(folder / "train.npy", NUMBERS.astype(np.int32)),
    ".npy, big-endian": lambda folder: save_npy(folder / "train.npy", NUMBERS.astype(">u2")),
}


def save_npy(path: Path, array: Any) -> Path:
    np.save(path, array, allow_pickle=array.dtype == object)
    return path


@pytest.fixture(params=["in memory", "threads"])
def way(request: pytest.FixtureRequest) -> str:
    """Whether the consumer's thread gathers tokens, or threads make batches ahead."""
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 500 tokens."""
    return write_raw(tmp_path / "train.bin", NUMBERS)


def tokens_in(way: str, *arguments: Any, **options: Any) -> Tokens:
    source = Tokens(*arguments, **options)
    assert source.in_memory
    source.in_memory = way == "in memory"
    return source


def windows(numbers: Any = NUMBERS, block: int = BLOCK, stride: int = BLOCK) -> list[list[int]]:
    return [numbers[at : at + block].tolist() for at in range(0, len(numbers) - block + 1, stride)]


def lists(feeder: Any) -> list[Any]:
    """The batches as lists of numbers."""
    return [
        batch.tolist() if isinstance(batch, torch.Tensor) else [part.tolist() for part in batch] for batch in feeder
    ]


# --- windows and formats ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_windows(name: str, way: str, tmp_path: Path) -> None:
    """Batches are the windows of the file's tokens as int64, in the order of the epoch."""
    feeder: Feeder[Any] = Feeder(tokens_in(way, FORMATS[name](tmp_path), BLOCK), batch_size=5)
    batches = list(feeder)
    assert all(batch.dtype == torch.int64 and batch.is_contiguous() for batch in batches)
    assert torch.cat(batches).tolist() == windows()
    assert type(feeder._session.pipeline).__name__.startswith("Resident" if way == "in memory" else "Streaming")


def test_targets_are_the_following_tokens(way: str, path: Path) -> None:
    """With targets a batch is two contiguous tensors, and the second is one token ahead; the last one has a target."""
    feeder: Feeder[Any] = Feeder(tokens_in(way, path, BLOCK, targets=True), batch_size=6, shuffle=True)
    pairs = []
    for x, y in feeder:
        assert x.is_contiguous()
        assert y.is_contiguous()
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        pairs += [(*a, b[-1]) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert sorted(pairs) == sorted(map(tuple, windows(block=BLOCK + 1, stride=BLOCK)))


@pytest.mark.parametrize("stride", [1, 3, 20])
def test_stride(stride: int, way: str, path: Path) -> None:
    """Windows begin every ``stride`` tokens: they overlap, or leave tokens out."""
    source = tokens_in(way, path, BLOCK, stride=stride)
    assert len(source) == len(windows(stride=stride))
    assert sorted(sum(lists(Feeder(source, batch_size=7, shuffle=True)), [])) == sorted(windows(stride=stride))


def test_windows_do_not_cross_files(way: str, tmp_path: Path) -> None:
    """Each file has windows of its own, also if files differ in format; keys name file and tokens."""
    files = [
        write_raw(tmp_path / "a.bin", NUMBERS[:30]),
        write_header(tmp_path / "b.bin", NUMBERS[30:77]),
        save_npy(tmp_path / "c.npy", NUMBERS[77:85].astype(np.int64)),
    ]
    source = tokens_in(way, files, BLOCK)
    expected = windows(NUMBERS[:30]) + windows(NUMBERS[30:77]) + windows(NUMBERS[77:85])
    assert torch.cat(list(Feeder(source, batch_size=4))).tolist() == expected
    shuffled: Feeder[Any] = Feeder(source, batch_size=4, shuffle=True)
    assert sorted(torch.cat(list(shuffled)).tolist()) == sorted(expected)
    assert [source.key(at) for at in (0, 2, 3, 8)] == [
        f"{files[0]}[0:8]", f"{files[0]}[16:24]", f"{files[1]}[0:8]", f"{files[2]}[0:8]"
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", np.uint16])
def test_raw_dtypes(dtype: Any, tmp_path: Path) -> None:
    """Tokens of every integer dtype arrive with their values."""
    numbers = np.array([0, 1, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
    path = write_raw(tmp_path / "train.bin", numbers, np.dtype(dtype).name)
    assert lists(Feeder(Tokens(path, 4, dtype=dtype), batch_size=1)) == [[numbers.tolist()]]


@pytest.mark.parametrize("dtype", [">u2", np.dtype(">i4"), ">u4", ">i8"])
def test_raw_tokens_of_the_other_byte_order(dtype: Any, way: str, tmp_path: Path) -> None:
    """A dtype with a byte order is that of the file, with every option; a pickled source and a mixture keep it."""
    path = tmp_path / "train.bin"
    NUMBERS.astype(dtype).tofile(path)
    source = tokens_in(way, path, BLOCK, dtype=dtype, targets=True, vocab=60_000)
    other = tokens_in(way, write_raw(tmp_path / "other.bin", NUMBERS), BLOCK, targets=True)
    options: list[dict[str, Any]] = [{}, {"cache": "device", "device": SimulatedDevice()}]
    for each in (source, pickle.loads(pickle.dumps(source)), source.joined([other])):
        for option in options:
            batches = list(Feeder(each, batch_size=5, **option))
            expected = windows(stride=BLOCK, block=BLOCK + 1) * (2 if len(each) > len(source) else 1)
            assert torch.cat([x.cpu() for x, _ in batches]).tolist() == [window[:-1] for window in expected]
            assert torch.cat([y.cpu() for _, y in batches]).tolist() == [window[1:] for window in expected]


def test_files_larger_than_memory(tmp_path: Path) -> None:
    """A file of a tebibyte is mapped at once, and threads make its batches."""
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        try:
            os.truncate(file.fileno(), 1 << 40)
        except OSError as error:
            pytest.skip(f"this file system has no sparse files of that size: {error}")
        file.seek(600 * 1024 * 2)
        file.write(np.arange(1024, dtype=np.uint16).tobytes())
    source = Tokens(path, 1024)
    assert len(source) == (1 << 39) // 1024
    assert not source.in_memory
    with Feeder(source, batch_size=2, sampler=[600, len(source) - 1]) as feeder:
        assert next(iter(feeder)).sum(1).tolist() == [1023 * 512, 0]


# --- options ----------------------------------------------------------------------------------------------------------


def test_window_shuffle_mixes_files(way: str, tmp_path: Path) -> None:
    """``shuffle="window:2"`` mixes the windows of two files at a time."""
    files = [write_raw(tmp_path / f"{number}.bin", np.full(80, number)) for number in range(6)]
    feeder: Feeder[Any] = Feeder(tokens_in(way, files, BLOCK), batch_size=20, shuffle="window:2")
    seen = [batch[:, 0].tolist() for batch in feeder]
    assert [len(set(numbers)) for numbers in seen] == [2, 2, 2]
    assert sorted(sum(seen, [])) == sorted(list(range(6)) * 10)


def test_tokens_are_a_dataset(path: Path) -> None:
    """A window is found by its index, so that torch's ``DataLoader`` gives the same batches."""
    source = Tokens(path, BLOCK, targets=True)
    assert source[-1][0].tolist() == windows()[-1]
    with pytest.raises(IndexError):
        source[len(source)]
    loader: Any = torch.utils.data.DataLoader(source, 6)  # type: ignore[arg-type]
    assert lists(loader) == lists(Feeder(source, batch_size=6))


@pytest.mark.parametrize("cache", ["host", "device"])
def test_a_cache_of_rows_with_parts_is_refused(cache: Any, path: Path) -> None:
    """A decoder whose row has parts cannot be cached, whatever its source."""
    decode = Tokens(path, BLOCK, targets=True).decoder
    with pytest.raises(TypeError, match=r"decode=TokenDecoder\(\): a cache cannot keep rows with parts"):
        Feeder(aiofeed.Files([path]), decode=decode, batch_size=1, cache=cache)


# --- order and state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 5, 10, 11])
def test_a_resume_in_the_other_way(position: int, way: str, path: Path) -> None:
    """A state that was saved in memory goes on in threads, and the other way round."""
    other = "threads" if way == "in memory" else "in memory"
    options: dict[str, Any] = {"batch_size": 6, "shuffle": True}
    expected: Feeder[Any] = Feeder(tokens_in(way, path, BLOCK), **options)
    whole = lists(expected) + lists(expected)
    feeder: Feeder[Any] = Feeder(tokens_in(way, path, BLOCK), **options)
    for _ in islice(feeder, position):
        pass
    state = json.loads(json.dumps(feeder.state_dict()))
    resumed: Feeder[Any] = Feeder(tokens_in(other, path, BLOCK), **options)
    resumed.load_state_dict(state)
    rest = lists(resumed) + (lists(resumed) if position < len(expected) else [])
    assert rest == whole[position:]


@pytest.mark.parametrize("changed", [{"block": 9}, {"stride": 9}, {"paths": "other.bin"}])
def test_the_state_of_other_windows_is_refused(changed: dict[str, Any], path: Path, tmp_path: Path) -> None:
    """A state belongs to the same files, block and stride."""
    write_raw(tmp_path / "other.bin", NUMBERS)
    state = Feeder(Tokens(path, BLOCK), batch_size=4).state_dict()
    options = {"paths": path, "block": BLOCK} | changed
    if "paths" in changed:
        options["paths"] = tmp_path / "other.bin"
    with pytest.raises(StateError):
        Feeder(Tokens(**options), batch_size=4).load_state_dict(state)


def test_a_pickled_source_maps_its_files_again(path: Path) -> None:
    """A copy of the source has the same windows, and no tokens in its pickle."""
    source = Tokens(path, BLOCK, targets=True)
    data = pickle.dumps(source)
    assert len(data) < 500
    copied = pickle.loads(data)
    assert lists(Feeder(copied, batch_size=6)) == lists(Feeder(source, batch_size=6))


# --- mixtures ---------------------------------------------------------------------------------------------------------


def test_a_mixture_of_tokens(way: str, tmp_path: Path) -> None:
    """Windows of several sources come in their proportions, and are counted by source."""
    web = Tokens(write_raw(tmp_path / "web.bin", np.full(800, 1)), BLOCK, targets=True)
    code = Tokens(write_raw(tmp_path / "code.bin", np.full(400, 2), "uint32"), BLOCK, "uint32", stride=4, targets=True)
    mixture = Mixture({"web": web, "code": code}, weights={"web": 3, "code": 1}, until=80)
    mixture.whole.in_memory = way == "in memory"  # type: ignore[union-attr]
    feeder: Feeder[Any] = Feeder(mixture, batch_size=8, shuffle=True)
    for x, _ in feeder:
        assert x.tolist().count([1] * BLOCK) == 6
    assert feeder.statistics().by_source == {"web": 60, "code": 20}


def test_many_files_of_tokens_ask_once_for_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The feeder of a mixture asks, not each of its sources."""
    asked: list[int] = []
    monkeypatch.setattr("aiofeed.tokens.windows.free_memory", lambda: asked.append(1) or 1 << 40)
    sources = {str(k): Tokens(write_raw(tmp_path / f"{k}.bin", range(64)), BLOCK) for k in range(20)}
    with Feeder(Mixture(sources, [1] * 20, until=64), batch_size=8) as feeder:
        assert len(list(feeder)) == 8
    assert asked == [1]


@pytest.mark.parametrize(
    ("others", "error", "message"),
    [
        ({"block": 9}, ValueError, "differ in block or targets"),
        ({"targets": True}, ValueError, "differ in block or targets"),
    ],
)
def test_windows_of_a_mixture_are_alike(
    others: dict[str, Any], error: type[Exception], message: str, path: Path
) -> None:
    """Sources of other windows do not fit into a batch."""
    with pytest.raises(error, match=message):
        Mixture({"a": Tokens(path, BLOCK), "b": Tokens(**{"paths": path, "block": BLOCK} | others)})


def test_tokens_mix_with_other_sources_and_names(path: Path) -> None:
    """Windows, parts of Tokens and other tokens come in one batch, each with the name of its source."""
    tokens, own = Tokens(path, BLOCK), [torch.arange(BLOCK)] * 10
    mixture = Mixture({"all": tokens, "part": tokens[:5], "own": own}, [2, 1, 1], until=80, names=True)
    feeder: Feeder[Any] = Feeder(mixture, batch_size=8, shuffle=True)
    known = {"all": windows(), "part": windows()[:5], "own": [list(range(BLOCK))]}
    for x, names in feeder:
        assert sorted(names) == ["all"] * 4 + ["own"] * 2 + ["part"] * 2
        assert all(row in known[name] for row, name in zip(x.tolist(), names, strict=True))


def damaged(folder: Path, kind: str) -> Path:
    """A file that is damaged in one way."""
    path = folder / "train.bin"
    match kind:
        case "odd":
            path.write_bytes(bytes(range(91)) * 11)
        case "empty":
            path.touch()
        case "header only":
            write_header(path, [])
        case "header says more":
            data = write_header(path, NUMBERS).read_bytes()
            path.write_bytes(data[:-2])
        case "odd after header":
            data = write_header(path, NUMBERS).read_bytes()
            path.write_bytes(data[:-1])
        case "other magic":
            write_header(path, NUMBERS, magic=20250401)
        case "big-endian header":
            data = write_header(path, NUMBERS).read_bytes()
            path.write_bytes(np.frombuffer(data[:1024], "<i4").astype(">i4").tobytes() + data[1024:])
        case "other version":
            write_header(path, NUMBERS, version=2)
        case "other size":
            write_header(path, NUMBERS, magic=278895051, bytes_per_token=3)
        case "no index":
            write_megatron(path, [NUMBERS]).with_suffix(".idx").write_bytes(b"TNTIDX\x00\x00" + b"\0" * 40)
        case "short index":
            index = write_megatron(path, [NUMBERS]).with_suffix(".idx")
            index.write_bytes(index.read_bytes()[:50])
        case "very short index":
            index = write_megatron(path, [NUMBERS]).with_suffix(".idx")
            index.write_bytes(index.read_bytes()[:20])
        case "index of another":
            index = write_megatron(path, [NUMBERS]).with_suffix(".idx").read_bytes()
            write_megatron(path, [NUMBERS, NUMBERS]).with_suffix(".idx").write_bytes(index)
        case "float index":
            index = bytearray(write_megatron(path, [NUMBERS]).with_suffix(".idx").read_bytes())
            index[17] = 6
            path.with_suffix(".idx").write_bytes(index)
        case "text as npy":
            path = folder / "train.npy"
            path.write_text("tokens")
        case "short npy":
            path = save_npy(folder / "train.npy", NUMBERS)
            path.write_bytes(path.read_bytes()[:-10])
        case "huge npy":
            path = save_npy(folder / "train.npy", NUMBERS)
            path.write_bytes(path.read_bytes().replace(b"(500,), }".ljust(29), b"(4611686018427387904,), }".ljust(29)))
        case "floats":
            path = save_npy(folder / "train.npy", NUMBERS / 2)
        case "rows":
            path = save_npy(folder / "train.npy", NUMBERS.reshape(2, -1))
        case "objects":
            path = save_npy(folder / "train.npy", NUMBERS.astype(object))
        case "short":
            write_raw(path, NUMBERS[:7])
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("odd", "1001 bytes, which is no whole number of uint16 tokens"),
        ("empty", "no tokens"),
        ("header only", "no tokens"),
        ("header says more", "says 500 uint16 tokens, but the file has 499"),
        ("odd after header", r"says 500 uint16 tokens, but the file has 499\.5"),
        ("other magic", "magic number 20250401, and aiofeed knows 20240520, 20240801, 278895051"),
        ("big-endian header", "has a big-endian header"),
        ("other version", "version 2; aiofeed reads version 1"),
        ("other size", "says 3 bytes per token, but must say 2 or 4"),
        ("no index", r"train\.idx.*is no index of Megatron: it begins with b'TNTIDX"),
        ("short index", r"train\.idx is truncated: 1 sequences need 62 bytes, it has 50"),
        ("very short index", r"train\.idx is truncated: it has 20 bytes"),
        ("index of another", "describes 1000 bytes of tokens, but .* has 2000"),
        ("float index", "dtype code 6"),
        ("text as npy", "no complete .npy file"),
        ("short npy", "no complete .npy file"),
        ("huge npy", r"no complete .npy file of numbers: it has 4128 bytes of 36893488147419103360"),
        ("floats", r"has float64 \[500\]: tokens are one-dimensional and uint8"),
        ("rows", r"has int64 \[2, 250\]"),
        ("objects", "no complete .npy file"),
        ("short", "has 7 tokens, and a window needs 8$"),
    ],
)
def test_damaged_files(kind: str, message: str, tmp_path: Path) -> None:
    """A damaged file is an error that names it, when the source is made."""
    path = damaged(tmp_path, kind)
    with pytest.raises(ValueError, match=message) as caught:
        Tokens(path, BLOCK)
    assert str(path.with_suffix("")) in str(caught.value)


GPT2 = np.random.default_rng(0).integers(50_257, size=COUNT)
LLAMA3 = np.random.default_rng(0).integers(128_256, size=COUNT)


@pytest.mark.parametrize(
    ("tokens", "dtype", "read_as"),
    [
        (GPT2, "int32", "uint16"),
        (GPT2, "int64", "uint16"),
        (LLAMA3, "int32", "uint16"),
        (LLAMA3, "int64", "uint16"),
        (LLAMA3, "int64", "uint32"),
        (LLAMA3, "int64", "int32"),
        (GPT2, "int32", "uint8"),
        (GPT2 % 65, "int32", "int16"),
        (GPT2, ">i4", ">u2"),
        (LLAMA3, ">i8", ">u4"),
    ],
)
def test_wider_tokens_than_the_dtype(tokens: Any, dtype: str, read_as: str, tmp_path: Path) -> None:
    """A raw file of integers that are wider than the dtype is an error that names the likely one."""
    path = write_raw(tmp_path / "train.bin", tokens, dtype)
    with pytest.raises(
        ValueError, match=rf"train\.bin seems to have {dtype} tokens: of each . {read_as} only .* dtype='{dtype}'"
    ):
        Tokens(path, BLOCK, read_as)
    assert Tokens(path, BLOCK, dtype).arrays[0].tolist() == tokens.tolist()


LEGAL: dict[str, Any] = {
    "padded": np.where(np.arange(4000) % 40 < 7, GPT2[np.arange(4000) % COUNT], 0),
    "few tokens": np.where(np.arange(4000) % 200 == 6, 50_256, 0),
    "zeros, then tokens": np.concatenate([np.zeros(1 << 15), GPT2]),
    "binary": np.arange(4000) % 2,
    "pairs of small tokens": np.tile([3, 0, 2, 1], 1000),
    "one token": np.full(4000, 50_256),
    "odd zeros, but for one": np.concatenate([np.stack([GPT2, GPT2 * 0], 1).ravel(), [7, 7]]),
    "letters": np.arange(4000) % 65,
    "short": np.array([7, 0] * 20),
}


@pytest.mark.parametrize("name", LEGAL)
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_zeros_and_small_tokens_are_legal(name: str, dtype: str, tmp_path: Path) -> None:
    """Files with many zeros, few different or only small tokens are read as the dtype that they have."""
    path = write_raw(tmp_path / "train.bin", LEGAL[name], dtype)
    assert Tokens(path, BLOCK, dtype).arrays[0].tolist() == LEGAL[name].tolist()


def test_a_file_that_names_its_dtype_is_not_examined(tmp_path: Path) -> None:
    """Tokens at even places only are read from a file of any format but raw ones."""
    tokens = np.stack([GPT2, GPT2 * 0], 1).ravel()
    header, megatron = write_header(tmp_path / "header.bin", tokens), write_megatron(tmp_path / "train.bin", [tokens])
    for path in (header, megatron, save_npy(tmp_path / "train.npy", tokens.astype(np.uint16))):
        assert Tokens(path, BLOCK).arrays[0].tolist() == tokens.tolist()


@pytest.mark.parametrize("text", ["Once upon a time\n" * 9, "Ça coûte 3 €.\r\n" * 9000, '{"text": "Es war"}\n' * 9])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_text_is_refused(text: str, dtype: str, tmp_path: Path) -> None:
    """A file of text is an error, and bytes of text are legal tokens of one byte."""
    path = tmp_path / "train.txt"
    path.write_bytes(text.encode())
    with pytest.raises(ValueError, match=rf"train\.txt is text, and not a file of {dtype} tokens"):
        Tokens(path, BLOCK, dtype)
    assert bytes(Tokens(path, BLOCK, "uint8").arrays[0]) == text.encode()


def test_other_formats_are_refused(tmp_path: Path) -> None:
    """Archives, pickles and Parquet files are errors that say what the file is; .npy is found by its header."""
    path = tmp_path / "train.bin"
    np.savez(tmp_path / "train.npz", NUMBERS)
    pickled = pickle.dumps(NUMBERS.tolist(), protocol=4)
    index = write_megatron(tmp_path / "other.bin", [NUMBERS]).with_suffix(".idx").read_bytes()
    for data, kind in {
        gzip.compress(NUMBERS.tobytes()): "compressed with gzip",
        (tmp_path / "train.npz").read_bytes(): "a zip file",
        pickled: "a pickle",
        b"PAR1" + bytes(100): "a Parquet file",
        index: "the index of a Megatron",
    }.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"train\.bin is {kind}.* not a file of uint8 tokens"):
            Tokens(path, BLOCK, "uint8")
    path.write_bytes(save_npy(tmp_path / "train.npy", NUMBERS).read_bytes())
    assert Tokens(path, BLOCK).arrays[0].tolist() == NUMBERS.tolist()


@pytest.mark.parametrize("place", [0, 200_000, 399_999])
@pytest.mark.parametrize("wrong", [50_257, -1])
def test_tokens_beyond_the_vocabulary(place: int, wrong: int, tmp_path: Path) -> None:
    """A token at the beginning, in the middle or at the end that is not in the vocabulary is an error."""
    tokens = np.full(400_000, 50_256)
    path = write_raw(tmp_path / "train.bin", tokens, "int32")
    assert len(Tokens(path, BLOCK, "int32", vocab=50_257)) == 50_000
    tokens[place] = wrong
    write_raw(path, tokens, "int32")
    with pytest.raises(ValueError, match=rf"train\.bin: token {place} is {wrong}, and vocab=50257"):
        Tokens(path, BLOCK, "int32", vocab=50_257)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", np.dtype(">u2")])
def test_raw_tokens_named_npy(dtype: Any, way: str, tmp_path: Path) -> None:
    """As OLMo and dolma write them, without the header: read with ``dtype=``, and refused with this advice without."""
    path = tmp_path / "part-0-00000.npy"
    NUMBERS.astype(dtype).tofile(path)
    source = tokens_in(way, path, BLOCK, dtype=dtype)
    for each in (source, pickle.loads(pickle.dumps(source)), source.joined([source])):
        assert lists(Feeder(each[:5], batch_size=5)) == [windows()[:5]]
    with pytest.raises(ValueError, match=r"00000\.npy is no complete \.npy file.*OLMo and dolma, pass dtype="):
        Tokens(path, BLOCK)


def test_the_header_of_npy_goes_first(tmp_path: Path) -> None:
    """A file with a header has the dtype of that, whatever ``dtype=`` says, and text is no tokens."""
    assert Tokens(save_npy(tmp_path / "a.npy", NUMBERS), BLOCK, dtype="uint16").arrays[0].tolist() == NUMBERS.tolist()
    (tmp_path / "b.npy").write_text("Once upon a time\n" * 9)
    with pytest.raises(ValueError, match=r"b\.npy is text"):
        Tokens(tmp_path / "b.npy", BLOCK, dtype="uint16")


@pytest.mark.parametrize(
    ("boundaries", "expected"),
    [
        ([0, 1, 3], [0, 300, 900]),
        ([0, 0, 3, 3], [0, 0, 900, 900]),
        ([0], [0, 900]),
        ([0, 2], [0, 500, 900]),
        ([], [0, 900]),
        ([1, 3], [0, 300, 900]),
        ([1, 2], [0, 300, 500, 900]),
    ],
)
def test_documents_of_megatron_cover_the_tokens(
    boundaries: list[int], expected: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Boundaries that are missing at the beginning or at the end are added, and a line in the log names the index."""
    numbers = np.arange(900)
    index = write_megatron(tmp_path / "a.bin", np.split(numbers, [300, 500])).with_suffix(".idx")
    head = index.read_bytes()[: 34 + 12 * 3]
    head = head[:26] + len(boundaries).to_bytes(8, "little") + head[34:]
    index.write_bytes(head + np.array(boundaries, "<i8").tobytes())
    [documents] = Tokens(tmp_path / "a.bin", BLOCK).documents
    assert documents is not None
    assert documents.tolist() == expected
    complete = boundaries[:1] == [0] and boundaries[-1:] == [3]
    assert [str(index) in record.message for record in caplog.records] == [True] * (not complete)


@pytest.mark.parametrize(
    ("place", "number", "at_once"),
    [(34 + 12, 5, True), (34 + 12 + 8, 5, True), (34 + 36 + 8, 4, False), (34 + 36 + 8, -1, False)],
    ids=["first sequence", "second sequence", "a document behind the end", "a document before the beginning"],
)
def test_a_damaged_index_of_megatron(place: int, number: int, at_once: bool, tmp_path: Path) -> None:
    """Sequences are compared when the source is made, documents when they are asked for."""
    index = write_megatron(tmp_path / "a.bin", np.split(np.arange(900), [300, 500])).with_suffix(".idx")
    damaged = bytearray(index.read_bytes())
    damaged[place : place + 8] = number.to_bytes(8, "little", signed=True)
    index.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"a\.idx is damaged") if at_once else contextlib.nullcontext():
        tokens = Tokens(tmp_path / "a.bin", BLOCK)
    if not at_once:
        with pytest.raises(ValueError, match=r"a\.idx is damaged"):
            _ = tokens.documents


@pytest.mark.skipif(sys.platform != "linux", reason="files have holes there")
def test_an_index_of_any_size_is_opened_at_once(tmp_path: Path) -> None:
    """An index is mapped, and a few of its places are read: here holes are sequences without tokens."""
    index, count = write_megatron(tmp_path / "a.bin", [np.arange(900)]).with_suffix(".idx"), 1 << 28
    head = index.read_bytes()
    with index.open("wb") as file:
        file.write(head[:18] + count.to_bytes(8, "little") + (2).to_bytes(8, "little"))
        file.truncate(34 + 12 * count + 16)
        for place, number in ((34 + 4 * count - 4, 900), (34 + 12 * count + 8, count)):
            file.seek(place)
            file.write(number.to_bytes(4, "little"))
    assert len(Tokens(tmp_path / "a.bin", BLOCK)) == 900 // BLOCK


def test_targets_need_one_token_more(tmp_path: Path) -> None:
    """A file of one window has no window with targets."""
    path = write_raw(tmp_path / "train.bin", NUMBERS[:BLOCK])
    assert len(Tokens(path, BLOCK)) == 1
    with pytest.raises(ValueError, match=r"has 8 tokens, and a window needs 9 \(block \+ 1, because targets=True\)"):
        Tokens(path, BLOCK, targets=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("train.bin", 0), ValueError, "Tokens\\(block=...\\)"),
        (("train.bin", 8.0), TypeError, "Tokens\\(block=...\\)"),
        (("train.bin", 8, "float32"), ValueError, "dtype.*uint8, int8.*got 'float32'"),
        (("train.bin", 8, "token"), ValueError, "got 'token'"),
        (("train.bin", 8, None), ValueError, "got None"),
        (("train.bin", 8, "uint16", 0), ValueError, "stride"),
        (("train.bin", 8, "uint16", None, 1), TypeError, "targets"),
        ((__file__, 8, "uint8", None, False, 0), ValueError, "Tokens\\(vocab=...\\)"),
        (([], 8), ValueError, "a glob without a match"),
        ((3, 8), TypeError, "got 3"),
        (([3], 8), TypeError, "got 3"),
    ],
)
def test_wrong_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    """A wrong argument is an error that names it and its value."""
    with pytest.raises(error, match=message):
        Tokens(*arguments)


def test_missing_files(path: Path, tmp_path: Path) -> None:
    """A file that does not exist is named; Megatron's prefix is completed."""
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "absent.bin"))):
        Tokens([path, tmp_path / "absent.bin"], BLOCK)
    with pytest.raises(FileNotFoundError, match=r"did you mean .*train\.bin\?"):
        Tokens(tmp_path / "train", BLOCK)


def test_block_size_is_explained(path: Path) -> None:
    """nanoGPT's name of the argument is explained."""
    with pytest.raises(TypeError, match="it is called block"):
        Tokens(path, block_size=8)  # type: ignore[call-arg]
