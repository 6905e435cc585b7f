"""``lengths="decoded"``: plans that measure what ``decode=`` returns, of any source, and form batches as it comes."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import aiofeed
from aiofeed.kernel.core.errors import CollateError, DecodeError, StateError

DOCUMENTS = 90
EVEN, ODD = range(0, DOCUMENTS, 2), range(1, DOCUMENTS, 2)


def text_of(number: int) -> str:
    return f"{number} " + "x " * (number * 7 % 23)


def tokenize(text: Any) -> dict[str, Any]:
    if isinstance(text, bytes):
        text = text.decode()
    words = (text["text"] if isinstance(text, dict) else text).split()
    return {"input_ids": [int(words[0])] * len(words)}


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return DOCUMENTS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return tokenize(text_of(index))


def new_source(kind: str, folder: Path) -> tuple[Any, Any]:
    """Return a source of the texts, and its ``decode=``."""
    lines = [json.dumps({"text": text_of(number)}) for number in range(DOCUMENTS)]
    if kind == "table":
        (folder / "x.jsonl").write_text("\n".join(lines))
        return aiofeed.Table(str(folder / "x.jsonl")), tokenize
    if kind == "stream":
        return aiofeed.Stream(lambda: map(json.loads, lines), shuffle_buffer=16), tokenize
    if kind == "files":
        for number in range(DOCUMENTS):
            (folder / f"{number:03}.txt").write_text(text_of(number))
        return aiofeed.Files(sorted(map(str, folder.glob("*.txt")))), tokenize
    if kind in ("mixture", "names"):
        parts = {"even": [tokenize(text_of(n)) for n in EVEN], "odd": [tokenize(text_of(n)) for n in ODD]}
        return aiofeed.Mixture(parts, names=kind == "names"), None
    return Texts(), None


PLANS = {
    "pack": lambda: aiofeed.Pack("decoded", context=32, rows=2, separator=999),
    "whole": lambda: aiofeed.Pack("decoded", context=32, rows=2, split=False, window=8),
    "budget": lambda: aiofeed.TokenBudget("decoded", max_tokens=64, window=16, length="input_ids"),
    "buckets": lambda: aiofeed.Buckets("decoded", [8, 16], [6, 4, 2], length=lambda sample: len(sample["input_ids"])),
}
KINDS = ["table", "stream", "files", "dataset", "mixture"]


def new_feeder(source: Any, decode: Any, plan: str, **options: Any) -> aiofeed.Feeder[Any]:
    shuffle = not isinstance(source, aiofeed.Stream)
    collate = None if "a" in plan[:2] or plan == "whole" else aiofeed.pad_collate()
    options = {"shard": None, "seed": 3, "shuffle": shuffle, "collate_fn": collate} | options
    return aiofeed.Feeder(source, decode=decode, batch_size=PLANS[plan](), **options)


def lists(batches: Any) -> list[Any]:
    return [
        {name: part.tolist() if hasattr(part, "tolist") else part for name, part in each.items()} for each in batches
    ]


def tokens_of(batches: list[Any]) -> dict[int, int]:
    """Return how often each document's token comes."""
    found: dict[int, int] = {}
    for batch in batches:
        mask = batch.get("attention_mask") or [[at >= 0 for at in row] for row in batch["document_ids"]]
        for row, kept in zip(batch["input_ids"], mask, strict=True):
            for token in itertools.compress(row, kept):
                found[token] = found.get(token, 0) + 1
    found.pop(999, None)
    return found


ALL = {number: len(text_of(number).split()) for number in range(DOCUMENTS)}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_stream_of_the_decoded_samples(tmp_path: Path, kind: str, plan: str) -> None:
    """The batches are those of the plan over a stream of the decoded samples, in the order of the source's epoch."""
    source, decode = new_source(kind, tmp_path)
    with new_feeder(source, decode, plan) as feeder:
        found = [lists(feeder), lists(feeder)]
    shuffle = kind != "stream"
    plain = aiofeed.Feeder(source, decode=decode, batch_size=7, shuffle=shuffle, seed=3, shard=None, collate_fn=list)
    items = [[sample for batch in plain for sample in batch] for _ in range(2)]
    measured = PLANS[plan]()
    measured.decoded, collate = None, None if isinstance(measured, aiofeed.Pack) else aiofeed.pad_collate()
    stream = aiofeed.Stream(lambda epoch: items[epoch])
    with aiofeed.Feeder(stream, batch_size=measured, seed=3, shard=None, collate_fn=collate) as model:
        assert found == [lists(model), lists(model)]
    assert tokens_of(found[0]) == tokens_of(found[1]) == ALL


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_at_any_batch_goes_on_exactly(tmp_path: Path, kind: str, plan: str) -> None:
    """A state taken after any batch continues with the same batches in a new feeder, also with other ranks."""
    source, decode = new_source(kind, tmp_path)
    with new_feeder(source, decode, plan) as feeder:
        states, batches = [feeder.state_dict()], []
        for batch in feeder.steps(24):
            batches += lists([batch])
            states.append(feeder.state_dict())
    for at in (0, 1, 3, 8, 13, 20):
        state = json.loads(json.dumps(states[at]))
        with new_feeder(source, decode, plan) as feeder:
            feeder.load_state_dict(state)
            assert lists(feeder.steps(24 - at)) == batches[at:]
    state, ranks = json.loads(json.dumps(states[3])), []
    for rank in range(2):
        with new_feeder(source, decode, plan, shard=(rank, 2)) as feeder:
            feeder.load_state_dict(state)
            ranks.append(lists(feeder.steps(2)))
    assert [batch for step in zip(*ranks, strict=True) for batch in step] == batches[3:7]


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_no_sample_is_lost_or_doubled_on_several_ranks(tmp_path: Path, kind: str, ranks: int, pad: bool) -> None:
    """All ranks together have each sample once; with ``pad=False`` each decodes its own, and resumes on its own."""
    source, decode = new_source(kind, tmp_path)
    batches: list[Any] = []
    for rank in range(ranks):
        with new_feeder(source, decode, "pack", shard=(rank, ranks), pad=pad) as feeder:
            iterator = iter(feeder)
            own = lists(itertools.islice(iterator, 2))
            state = feeder.state_dict()
        with new_feeder(source, decode, "pack", shard=(rank, ranks), pad=pad) as feeder:
            feeder.load_state_dict(state)
            own += lists(feeder)
        batches.append(own)
    if pad:
        with new_feeder(source, decode, "pack") as feeder:
            whole = lists(feeder)
        steps = [batch for step in zip(*batches, strict=True) for batch in step]
        assert steps == whole + whole[-1:] * (len(steps) - len(whole))
    else:
        assert tokens_of([batch for own in batches for batch in own]) == ALL


def test_options_act_on_samples_before_the_plan(tmp_path: Path) -> None:
    """exclude=, cache=, on_error= and keys= act on samples, and a function as length= runs in the decode threads."""
    threads = set()

    def length(sample: Any) -> int:
        threads.add(threading.current_thread().name.rstrip("0123456789"))
        return len(sample["input_ids"])

    def decode(row: Any) -> Any:
        if row["text"].startswith("5 "):
            raise ValueError("no tokens")
        return tokenize(row)

    source, _ = new_source("table", tmp_path)
    plan = aiofeed.Pack("decoded", context=32, rows=2, length=length)
    options: dict[str, Any] = {"exclude": [7], "cache": "host", "keys": True, "shuffle": True}
    policy = aiofeed.FailurePolicy("skip", max_failures=3)
    with aiofeed.Feeder(source, decode=decode, batch_size=plan, on_error=policy, shard=None, **options) as feeder:
        for _ in range(2):
            pairs = list(feeder)
            assert tokens_of(lists(batch for batch, _ in pairs)) == {n: c for n, c in ALL.items() if n not in (5, 7)}
            for batch, keys in pairs:
                for row, ids, names in zip(
                    batch["input_ids"].tolist(), batch["document_ids"].tolist(), keys, strict=True
                ):
                    tokens = dict.fromkeys(token for token, document in zip(row, ids, strict=True) if document >= 0)
                    assert names == [f"{source.name}[{token}]" for token in tokens]
        assert {failure.key for failure in feeder.failures} == {f"{source.name}[5]"}
    assert threads == {"aiofeed-decode-"}


def test_errors_name_the_sample(tmp_path: Path) -> None:
    """A failed decode is raised after batches before it, with the key of its sample; a sample without a length, too."""

    def decode(row: Any) -> Any:
        return tokenize(row) if not row["text"].startswith("80 ") else 1 / 0

    source, _ = new_source("table", tmp_path)
    with aiofeed.Feeder(source, decode=decode, batch_size=PLANS["pack"](), shard=None) as feeder:
        batches = iter(feeder)
        next(batches)
        with pytest.raises(DecodeError, match=r"\[80\]"):
            list(batches)
    for decode, plan, message in (
        (tokenize, aiofeed.Pack("decoded", 8, split=False), r"x.jsonl\[2\]'.*more than context=8"),
        (lambda row: row["text"], aiofeed.Pack("decoded", 8), r"x.jsonl\[0\]'.*finds no length in sample 0, a str"),
        (
            lambda row: row["text"],
            aiofeed.Pack("decoded", 8, length=lambda text: 1 / 0),
            r"x.jsonl\[0\]'.*division by zero",
        ),
    ):
        with aiofeed.Feeder(source, decode=decode, batch_size=plan) as feeder, pytest.raises(CollateError) as error:
            list(feeder)
        error.match(message.replace("x.jsonl", ".*x.jsonl"))
    with pytest.raises(ValueError, match="groups"):
        aiofeed.Balanced("decoded", 64)
    with pytest.raises(ValueError, match="'decoded'"):
        aiofeed.Feeder(source, decode=decode, batch_size=aiofeed.Pack(context=8))


def test_a_state_of_other_data_or_another_order_is_refused(tmp_path: Path) -> None:
    """A state is refused by a feeder with other data or another order."""
    source, decode = new_source("table", tmp_path)
    with new_feeder(source, decode, "pack") as feeder:
        next(iter(feeder))
        state = feeder.state_dict()
    for options in ({"shuffle": False}, {"shuffle": "keyed"}, {"exclude": [1]}):
        with new_feeder(source, decode, "pack", **options) as feeder, pytest.raises(StateError):
            feeder.load_state_dict(state)
    with new_feeder(source[:50], decode, "pack") as feeder, pytest.raises(StateError):
        feeder.load_state_dict(state)


def test_threads_end_and_epochs_begin_anew(tmp_path: Path) -> None:
    """After a break the next epoch begins at its start, also while a decode waits, and close() ends the threads."""
    waits, go_on = threading.Event(), threading.Event()

    def decode(row: Any) -> Any:
        if waits.is_set():
            go_on.wait(30)
        return tokenize(row)

    source, _ = new_source("table", tmp_path)
    with new_feeder(source, decode, "pack") as feeder:
        first = lists(feeder)
        for waiting in (False, True, True):
            feeder.set_epoch(0)
            batches = iter(feeder)
            next(batches)
            if waiting:
                waits.set()
                feeder.set_epoch(1)
                batches = iter(feeder)
            del batches
            go_on.set()
            waits.clear()
            feeder.set_epoch(0)
            assert lists(feeder) == first
            go_on.clear()
    sessions = [feeder._session, feeder._source.feeder._session]
    assert all(session.pipeline.loop_thread.finished.done() for session in sessions)
    with new_feeder(Texts(), None, "pack") as feeder, pickle.loads(pickle.dumps(feeder)) as copy:
        assert lists(copy) == lists(feeder)


def test_closing_does_not_wait_for_decodes() -> None:
    """A closed iterator ends the thread that waits for decoded samples, although a decode does not return."""
    waits, go_on, decoded = threading.Event(), threading.Event(), itertools.count()

    def decode(text: str) -> Any:
        if next(decoded) >= 100:  # in the second batch of 64
            waits.set()
            go_on.wait(30)
        return tokenize(text)

    def consume(batches: Any) -> None:
        with contextlib.suppress(aiofeed.errors.IteratorClosedError):
            list(batches)

    before = {*threading.enumerate()}
    texts = aiofeed.Stream(lambda: map(text_of, range(1000)))
    with new_feeder(texts, decode, "pack", shuffle=False) as feeder:
        batches = iter(feeder)
        consumer = threading.Thread(target=consume, args=(batches,))
        consumer.start()
        assert waits.wait(30)
        readers = [each for each in {*threading.enumerate()} - before if each.name.startswith("aiofeed-stream")]
        batches.close()
        for thread in [*readers, consumer]:
            thread.join(2)  # less than a stream is waited for
        ended = [not thread.is_alive() for thread in [*readers, consumer]]
        go_on.set()
    assert len(ended) == 3
    assert all(ended)


def test_names_go_into_rows_and_counts(tmp_path: Path) -> None:
    """With names=True ``source_ids`` has the source of each token, also of samples that are measured as they come."""
    source, _ = new_source("names", tmp_path)
    for plan in (PLANS["pack"](), aiofeed.Pack([len(text_of(n).split()) for n in [*EVEN, *ODD]], 32, 2, separator=999)):
        with aiofeed.Feeder(source, batch_size=plan, shuffle=True, shard=None) as feeder:
            batches = list(feeder)
            assert feeder.statistics().by_source == {"even": 45, "odd": 45}
        for batch in batches:
            tokens, sources, kept = batch["input_ids"], batch["source_ids"], batch["document_ids"] >= 0
            assert sources.dtype == torch.int64
            assert (sources[~kept] == -1).all()
            assert (sources[kept] >= 0).all()
            documents = kept & (tokens != 999)
            assert (sources[documents] == tokens[documents] % 2).all()
        assert tokens_of(lists(batches)) == ALL
