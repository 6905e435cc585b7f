"""Feeders with ``Pack``: batches, ranks, state, failures, and what they work with."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import aiofeed
from aiofeed import DiskCache, FailurePolicy, Feeder, HostCache, Pack, Tensors
from aiofeed.errors import BatchFailedError, CollateError, ReadError
from tests.support.packed import PAD, SEPARATOR, STEP, Documents, all_tokens, document, lognormal, pieces_of, tokens_of
from tests.support.simulated_device import SimulatedDevice

pytestmark = pytest.mark.usefixtures("forked_workers")

LENGTHS = [int(length) for length in lognormal(60, 12)]
EXPECTED = all_tokens(LENGTHS, separated=True)


def feeder(**options: Any) -> Feeder[Any]:
    """Batches of two rows of 32 tokens."""
    options.setdefault("batch_size", pack())
    options.setdefault("source", Documents(LENGTHS))
    return Feeder(**{"shard": None, "shuffle": True, **options})


def pack(**options: Any) -> Pack:
    return Pack(LENGTHS, 32, 2, **{"separator": SEPARATOR, "pad": PAD, **options})


def pieces(batch: Any) -> list[list[int]]:
    return pieces_of({name: getattr(value, "tensor", value) for name, value in batch.items()}, 2, 32)


def plain(batch: Any) -> dict[str, Any]:
    """A batch as lists."""
    pieces(batch)
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def two_epochs(**options: Any) -> list[list[dict[str, Any]]]:
    with feeder(**options) as whole:
        return [[plain(batch) for batch in whole] for _ in range(2)]


@pytest.mark.parametrize(
    ("on_oversize", "rows"),
    [("truncate", [[1, 1, 1, 9], [2, 2, 2, 2], [3, 3, 3, 3]]), ("skip", [[1, 1, 1, 9]])],
)
def test_a_separator_is_a_token_of_its_document(on_oversize: Any, rows: list[list[int]]) -> None:
    """With split=False a document of a whole row is too long if there is a separator, which is cut first."""
    documents = [torch.full((length,), token) for length, token in ((3, 1), (4, 2), (5, 3))]
    plan = Pack([3, 4, 5], 4, 1, separator=9, split=False, on_oversize=on_oversize)
    with feeder(source=documents, batch_size=plan, shuffle=False) as packed:
        assert [batch["tokens"].tolist() for batch in packed] == [[row] for row in rows]


class Encoded:
    """A source of the same documents."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def key(self, index: int) -> str:
        return f"document {index}"

    async def read(self, index: int) -> bytes:
        return bytes(document(index, LENGTHS[index]).numpy())


def decode(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int64)


@pytest.mark.parametrize("split", [True, False])
def test_every_token_comes_once_per_epoch(split: bool) -> None:
    """In every epoch; each has other rows. Batches that are kept are not overwritten."""
    with feeder(batch_size=pack(split=split, **({} if split else {"on_oversize": "truncate"}))) as whole:
        most = None if split else 32
        kept = [list(whole) for _ in range(20)]
        assert len(whole) == len(kept[0])
    rows = set()
    for batches in kept:
        found = list(map(pieces, batches))
        assert tokens_of(itertools.chain.from_iterable(found)) == all_tokens(LENGTHS, separated=True, most=most)
        rows.add(json.dumps(found))
    assert len(rows) == 20


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"source": Encoded(), "decode": decode},
        {"source": Encoded(), "decode": decode, "engine": "process:2"},
        {"source": aiofeed.FromDataset(Documents(LENGTHS), threads=3)},
        {"on_error": FailurePolicy(decode_timeout_s=30.0)},
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "-".join(map(str, value)),
)
def test_the_same_batches_with_other_options(options: dict[str, Any], split: bool) -> None:
    """Whatever the threads, chunks, processes and limits."""
    other = pack(split=split, **({} if split else {"on_oversize": "truncate"}))
    assert two_epochs(batch_size=other, **options) == two_epochs(batch_size=other)


def test_a_device() -> None:
    """Tensors are copied from the batch's own memory; ``max_seqlen`` stays an int."""
    device = SimulatedDevice()
    with feeder() as expected, feeder(device=device) as copied:
        for want, got in zip(expected, copied, strict=True):
            assert type(got["max_seqlen"]) is int
            for name in ("tokens", "position_ids", "document_ids", "cu_seqlens"):
                assert got[name].tolist() == want[name].tolist()


@pytest.mark.parametrize("cache", [HostCache(), "disk"])
def test_a_cache_of_documents_of_one_length(cache: Any, tmp_path: Path) -> None:
    """From the second epoch on they come from the cache."""
    documents = Documents([10] * 30)
    cache = DiskCache(tmp_path / "tokens") if cache == "disk" else cache
    options = {"batch_size": Pack([10] * 30, 32, 2, separator=SEPARATOR, pad=PAD)}
    with feeder(source=documents, cache=cache, **options) as cached:
        found = [[plain(batch) for batch in cached] for _ in range(2)]
    assert found == two_epochs(source=Documents([10] * 30), **options)
    assert len(set(documents.asked)) == len(documents.asked)


def test_a_resume_at_every_position_with_another_world_size() -> None:
    """No token is lost or doubled, except those of batches that pad the ranks."""
    [expected, _] = two_epochs()
    for stop in range(len(expected) // 2 + 1):
        ranks = [feeder(shard=(rank, 2)) for rank in (0, 1)]
        iterators = [iter(each) for each in ranks]
        seen = [plain(next(iterator)) for _ in range(stop) for iterator in iterators]
        assert seen == expected[: 2 * stop]
        state = json.loads(json.dumps(ranks[1].state_dict()))
        for each in ranks:
            each.close()
        rest = []
        for rank in range(3):
            with feeder(shard=(rank, 3), engine="process:2" if stop == 1 else "thread") as later:
                later.load_state_dict(state)
                rest.append([plain(batch) for batch in later])
        found = [batch for step in zip(*rest, strict=True) for batch in step]
        assert found[: len(expected) - 2 * stop] == expected[2 * stop :]


# --- failures ---


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_skipped_document_leaves_padding(engine: Any) -> None:
    """All other tokens stay where they are."""
    lost = max(range(60), key=LENGTHS.__getitem__)
    with feeder() as whole, feeder(source=Documents(LENGTHS, [lost]), on_error="skip", engine=engine) as skipping:
        found = []
        for want, got in zip(whole, skipping, strict=True):
            found += pieces(got)
            left = got["document_ids"] >= 0
            assert torch.equal(got["tokens"][left], want["tokens"][left])
            gone = want["tokens"][~left]
            assert set(gone[gone >= 0].tolist()) <= set(range(STEP * lost, STEP * lost + STEP))
        assert skipping.statistics().failures >= 1
    assert tokens_of(found) == EXPECTED - tokens_of([[*range(STEP * lost, STEP * lost + LENGTHS[lost]), SEPARATOR]])


def test_an_excluded_document_is_in_no_row() -> None:
    """`exclude=` leaves out all its tokens and no others, and does not read it."""
    source = Documents(LENGTHS, fails_at=[3])
    with feeder(source=source, exclude=[3]) as rest:
        for _ in range(2):
            found = [piece for batch in rest for piece in pieces(batch)]
            assert tokens_of(found) == EXPECTED - tokens_of([[*range(STEP * 3, STEP * 3 + LENGTHS[3]), SEPARATOR]])
    assert 3 not in source.asked


def test_a_batch_without_documents_is_an_error() -> None:
    """If all of them were skipped."""
    with (
        feeder(source=Documents(LENGTHS, range(60)), on_error=FailurePolicy("skip", max_failures=60)) as none,
        pytest.raises(BatchFailedError),
    ):
        next(iter(none))


def test_a_broken_document_is_an_error() -> None:
    """With its name, at its batch."""
    with (
        feeder(source=Documents(LENGTHS, [7]), shuffle=False) as broken,
        pytest.raises(ReadError, match=r"7\b.*broken"),
    ):
        list(broken)


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_another_length_than_planned_is_an_error(on_error: Any, engine: Any) -> None:
    """Which no policy skips: every place after it would be another."""
    lengths = [*LENGTHS[:9], LENGTHS[9] + 1, *LENGTHS[10:]]
    message = rf"the document 'Documents\[9\]' has {LENGTHS[9] + 1} tokens, and Pack\(lengths=\) has {LENGTHS[9]}"
    wrong = feeder(source=Documents(lengths), on_error=on_error, engine=engine)
    with wrong, pytest.raises(CollateError, match=message):
        list(wrong)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"collate_fn": list}, ValueError, "collate_fn= .*Pack puts the batches together"),
        ({"on_error": "replace"}, ValueError, "a replacement has another length.*on_error='skip'"),
        ({"device": [SimulatedDevice(), SimulatedDevice()]}, ValueError, "cu_seqlens.*one feeder for each"),
        ({"static_batches": True}, ValueError, "cu_seqlens of Pack varies"),
        ({"cache": "device"}, ValueError, "leave it out"),
        ({"source": Tensors(torch.zeros(60, 3))}, ValueError, "a row of Tensors is a tuple"),
        ({"sampler": [1], "shuffle": False}, ValueError, "a plan decides the order"),
        ({"shuffle": "keyed"}, ValueError, "a plan shuffles a list"),
        ({"source": Documents(LENGTHS[:-1])}, ValueError, "60 lengths for 59 samples"),
        ({"batch_size": Pack}, TypeError, "batch_size"),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "-".join(map(str, value)),
)
def test_what_pack_excludes(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """The message says why and what to do."""
    with pytest.raises(error, match=message):
        feeder(**options)


def test_samples_that_are_tuples_are_an_error() -> None:
    """A dict of columns has a name for each. A ``TensorDataset`` is known to give tuples."""
    with pytest.raises(ValueError, match=r"in which \[0\] cannot be packed, is not possible with Pack"):
        feeder(source=TensorDataset(torch.zeros(60, 3)))
    with feeder(source=[(torch.zeros(3),)] * 60) as wrong, pytest.raises(CollateError, match="in a tuple"):
        list(wrong)


# --- several sources ---


def test_a_mixture_of_documents() -> None:
    """Each drawn document comes whole, as often as it is drawn; a split one counts once, with its first part."""
    sources = {"web": Documents(LENGTHS[:40]), "code": Documents(LENGTHS[40:])}
    mixed = aiofeed.Mixture(sources, {"web": 0.5, "code": 0.5}, names=False)
    with feeder(source=mixed, batch_size=Pack(LENGTHS, 32, 2, pad=PAD)) as whole:
        found: list[list[int]] = []
        for batch in whole:
            found += pieces(batch)
            begun = sum(piece[0] % STEP == 0 for piece in found)
            assert sum(whole.statistics().by_source.values()) == begun
        assert whole.statistics().by_source == {"web": 40, "code": 40}
    code = tokens_of(document(index, length).tolist() for index, length in enumerate(LENGTHS[40:]))
    web = tokens_of(document(index, length).tolist() for index, length in enumerate(LENGTHS[:40]))
    assert tokens_of(found) == code + code + web
