"""``Tokens(documents="positions")``, the documents inside windows, and ``offset="epoch"``, windows that move."""

from __future__ import annotations

import itertools
import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiofeed import FailurePolicy, Feeder, HostCache, Limits, Pack, Tokens
from tests.support.simulated_device import SimulatedDevice
from tests.support.token_files import write_megatron, write_raw

BLOCK, EOT = 8, 3
NUMBERS = np.random.default_rng(0).integers(0, 20, 500)
TEXTS = np.split(NUMBERS, [7, 7, 30, 31, 32, 200, 208, 400])


def files(folder: Path) -> list[Path]:
    """Two files with separators."""
    return [write_raw(folder / "a.bin", NUMBERS[:300]), write_raw(folder / "b.bin", NUMBERS[300:])]


def model(numbers: Any, ends: set[int], stride: int, ignored: int | None, targets: bool) -> list[dict[str, list[int]]]:
    """The windows of a file, token by token; `ends` are the first tokens of documents."""
    found = []
    for first in range(0, len(numbers) - BLOCK - targets + 1, stride):
        window: dict[str, list[int]] = {"tokens": [], "position_ids": []} | ({"labels": []} if targets else {})
        position = 0
        for at in range(first, first + BLOCK):
            position = 0 if at == first or at in ends else position + 1
            window["tokens"].append(int(numbers[at]))
            window["position_ids"].append(position)
            if targets:
                masked = ignored is not None and at + 1 in ends
                window["labels"].append(ignored if masked else int(numbers[at + 1]))  # type: ignore[arg-type]
        found.append(window)
    return found


def separated(numbers: Any) -> set[int]:
    return {int(at) + 1 for at in np.flatnonzero(numbers == EOT)}


def rows_in(batch: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The windows of a batch, after a comparison of what it has of all of them."""
    flat = batch["position_ids"].flatten().tolist()
    starts = [at for at, position in enumerate(flat) if position == 0]
    assert batch["cu_seqlens"].tolist() == [*starts, len(flat)]
    assert batch["cu_seqlens"].dtype == torch.int32
    sizes = [stop - start for start, stop in itertools.pairwise([*starts, len(flat)])]
    assert batch["max_seqlen"] == max(sizes)
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    assert batch["document_ids"].flatten().tolist() == numbers
    assert batch["document_ids"].shape == batch["tokens"].shape
    names = [name for name in ("tokens", "labels", "position_ids") if name in batch]
    assert {batch[name].dtype for name in names} == {torch.int64}
    return [dict(zip(names, row, strict=True)) for row in zip(*[batch[name].tolist() for name in names], strict=True)]


def fed(source: Any, **options: Any) -> list[dict[str, list[int]]]:
    with Feeder(source, **{"batch_size": 4, **options}) as feeder:
        return [row for batch in feeder for row in rows_in(batch)]


@pytest.mark.parametrize("targets", [False, True])
@pytest.mark.parametrize("stride", [8, 3])
@pytest.mark.parametrize("kind", ["separator", "Megatron"])
def test_positions_are_those_of_a_loop(kind: str, stride: int, targets: bool, tmp_path: Path) -> None:
    """Positions, labels and borders equal those of a loop over tokens, for files with separators and with an index."""
    options: dict[str, Any] = {"stride": stride, "targets": targets, "documents": "positions"}
    ignored = -100 if targets else None
    if kind == "separator":
        source = Tokens(files(tmp_path), BLOCK, separator=EOT, labels=ignored, **options)
        parts = [NUMBERS[:300], NUMBERS[300:]]
        expected = [row for part in parts for row in model(part, separated(part), stride, ignored, targets)]
    else:
        source = Tokens(write_megatron(tmp_path / "a.bin", TEXTS), BLOCK, labels=ignored, **options)
        ends = set(np.cumsum([*map(len, TEXTS)]).tolist()) - {500}
        expected = model(NUMBERS, ends, stride, ignored, targets)
    assert fed(source) == expected
    assert fed(source[::-1]) == expected[::-1]
    assert fed(pickle.loads(pickle.dumps(source))) == expected
    assert rows_in({name: value[None] if getattr(value, "ndim", 0) == 1 and name != "cu_seqlens" else value
                    for name, value in source[-1].items()}) == expected[-1:]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"device": SimulatedDevice()},
        {"limits": Limits(prefetch_batches=2, decode_threads=2)},
        {"on_error": FailurePolicy(read_timeout_s=30)},
        {"engine": "process:1"},
        {"in_order": False},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("offset", [None, "epoch"])
def test_the_same_batches_with_other_options(
    offset: Any, options: dict[str, Any], tmp_path: Path, forked_workers: None
) -> None:
    """On a device, in threads and in processes."""
    source = Tokens(files(tmp_path), BLOCK, targets=True, documents="positions", separator=EOT, offset=offset)
    with (
        Feeder(source, batch_size=4, shuffle=True) as plain,
        Feeder(source, batch_size=4, shuffle=True, **options) as other,
    ):
        for _ in range(2):
            expected = [row for batch in plain for row in rows_in(batch)]
            found = [
                row
                for batch in other
                for row in rows_in({name: getattr(each, "tensor", each) for name, each in batch.items()})
            ]
            assert sorted(map(str, found)) == sorted(map(str, expected))
            assert found == expected or options == {"in_order": False}


@pytest.mark.parametrize("stride", [8, 7, 24])
def test_windows_move_in_each_epoch(stride: int, tmp_path: Path) -> None:
    """By another number of tokens below the stride in each of the first epochs, the same for all windows of a file."""
    paths = [write_raw(tmp_path / "a.bin", np.arange(300)), write_raw(tmp_path / "b.bin", np.arange(300, 500))]
    source = Tokens(paths, BLOCK, stride=stride, targets=True, offset="epoch")
    moves = []
    with Feeder(source, batch_size=4, shuffle=True) as feeder:
        for _ in range(stride // 2):
            pairs = [(x[0], y[0]) for batch in feeder for x, y in zip(*map(torch.Tensor.tolist, batch), strict=True)]
            firsts = sorted(x for x, _ in pairs)
            assert all(y == x + 1 for x, y in pairs)
            counts = [(size - BLOCK - 1 - (stride - 1)) // stride + 1 for size in (300, 200)]
            assert firsts == [
                *range(firsts[0], 300, stride)[: counts[0]],
                *range(firsts[0] + 300, 500, stride)[: counts[1]],
            ]
            moves.append(firsts[0])
    assert len(set(moves)) == len(moves)
    assert max(moves) < stride
    with Feeder(source, batch_size=4, seed=1) as other:
        others = [min(min(x[:, 0].tolist()) for x, _ in other) for _ in range(len(moves))]
    assert others != moves or stride < 8


@pytest.mark.parametrize("shuffle", [True, False, "keyed", "window"])
def test_moved_windows_are_resumed(shuffle: Any, tmp_path: Path) -> None:
    """In the middle of an epoch, on other ranks, and each rank has its part of the windows."""
    source = Tokens(files(tmp_path), BLOCK, documents="positions", separator=EOT, offset="epoch")
    with Feeder(source, batch_size=2, shuffle=shuffle) as feeder:
        list(feeder)
        whole = [rows_in(batch) for batch in feeder]
        feeder.set_epoch(1)
        assert [rows_in(batch) for batch in islice(feeder, 3)] == whole[:3]
        state = json.loads(json.dumps(feeder.state_dict()))
    found = []
    for rank in (0, 1):
        with Feeder(source, batch_size=2, shuffle=shuffle, shard=(rank, 2)) as feeder:
            feeder.load_state_dict(state)
            found += [row for batch in feeder for row in rows_in(batch)]
    # A sample or two come again, so that both ranks have as many.
    assert {*map(str, found)} == {str(row) for batch in whole[3:] for row in batch}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": "yes"}, 'takes documents="positions" and offset="epoch", got \'yes\' and None'),
        ({"offset": 3}, "got None and 3"),
        ({"labels": -100}, r"Tokens\(labels=, separator=\) need documents="),
        ({"separator": 3}, r"Tokens\(labels=, separator=\) need documents="),
        ({"documents": "positions", "labels": -100}, "labels= targets=True, too"),
        ({"documents": "positions"}, r"nothing says where the documents of .*a\.bin end"),
        ({"documents": "positions", "column": "x"}, "for files on disk"),
        ({"offset": "epoch", "stride": 293}, "has 300 tokens, and a window needs 301"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """What is missing or does not fit is an error when the source is made."""
    if options.get("stride"):
        assert len(Tokens(files(tmp_path)[:1], BLOCK, **options)) == 1
        options = {**options, "block": 9}
    with pytest.raises(ValueError, match=message):
        Tokens(files(tmp_path)[0], **{"block": BLOCK, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "device", "device": SimulatedDevice()}, "depends on documents or epoch: leave it out"),
        ({"cache": HostCache()}, "rows are decoded already|depends on documents or epoch"),
        ({"device": [SimulatedDevice(), SimulatedDevice()]}, "cu_seqlens is one for all rows"),
        ({"static_batches": True, "drop_last": True}, "cu_seqlens is one for all rows"),
        ({"batch_size": Pack([8] * 62, 16)}, "its windows are full: pass Documents"),
    ],
)
def test_what_documents_in_windows_exclude(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """It is refused before the first batch."""
    source = Tokens(write_megatron(tmp_path / "a.bin", TEXTS), BLOCK, documents="positions")
    with pytest.raises((TypeError, ValueError), match=message):
        Feeder(source, **{"batch_size": 4, **options})
