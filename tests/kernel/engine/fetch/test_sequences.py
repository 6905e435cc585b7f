"""``pad_collate``: shapes, values, sides, masks. The builder of ``Pack``: columns, dtypes, errors."""

from __future__ import annotations

import pickle
import re
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from aiofeed import pad_collate
from aiofeed.kernel.core.types import BatchPlan
from aiofeed.kernel.engine.fetch.collate import MisfitError, misfit_error
from aiofeed.kernel.runtime.buffers import HostBufferPool
from aiofeed.kernel.runtime.tensors import as_tensors
from aiofeed.plans.sequences import PackBatchBuilder, PackCollate


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.sampled_from(["right", "left"]),
    st.none() | st.integers(1, 8),
)
def test_tokens_and_mask(lengths: list[int], side: Any, multiple_of: int | None) -> None:
    """Where the mask is 1 are the tokens, in order; elsewhere is the value."""
    samples = [torch.arange(1, length + 1) for length in lengths]
    batch, mask = pad_collate(-7, side=side, multiple_of=multiple_of)(samples)
    total = -(-max(lengths) // (multiple_of or 1)) * (multiple_of or 1)
    assert batch.shape == mask.shape == (len(lengths), total)
    assert mask.dtype == torch.int64
    for row, ones, sample in zip(batch, mask.bool(), samples, strict=True):
        assert torch.equal(row[ones], sample)
        assert (row[~ones] == -7).all()
        expected = torch.arange(total) < len(sample)
        assert torch.equal(ones, expected.flip(0) if side == "left" else expected)


def test_dicts() -> None:
    """Parts of the sample's length are padded, each with its value; others are collated as they are."""

    def sample(length: int) -> dict[str, Any]:
        return {
            "input_ids": torch.arange(length),
            "labels": np.arange(length),
            "embedding": torch.ones(length, 3, dtype=torch.bfloat16),
            "image": torch.zeros(2, 2),
            "name": f"{length}",
            "weight": 0.5,
        }

    batch = pad_collate({"labels": -100})([sample(3), sample(5)])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[0, 1, 2, -100, -100], [0, 1, 2, 3, 4]]
    assert batch["embedding"].shape == (2, 5, 3)
    assert batch["image"].shape == (2, 2, 2)
    assert batch["name"] == ["3", "5"]
    assert batch["weight"].dtype == torch.float64
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    own = pad_collate(9)([{"x": torch.ones(n), "attention_mask": torch.ones(n, dtype=torch.bool)} for n in (1, 2)])
    assert own["attention_mask"].tolist() == [[True, False], [True, True]]


def test_tuples() -> None:
    """They become lists with the mask at the end; values may be given by place."""
    x, y, label, mask = pad_collate([0, -1, 0])([(torch.ones(n), torch.ones(n), n) for n in (1, 2)])
    assert x.tolist() == [[1, 0], [1, 1]]
    assert y.tolist() == [[1, -1], [1, 1]]
    assert label.tolist() == [1, 2]
    assert mask.tolist() == [[1, 0], [1, 1]]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


MAKERS: dict[str, Any] = {
    "tensors": ones,
    "arrays": lambda *n: np.ones(n, np.float32),
    "lists": lambda *n: [1.0] * n[0],
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("lengths", [[(5, 5), (5, 5)], [(5, 2), (5, 7)], [(3, 2), (6, 2)], [(3, 6)], [(0, 1), (2, 0)]])
def test_named_parts_have_lengths_and_masks_of_their_own(make: str, lengths: list[tuple[int, int]]) -> None:
    """Whatever the sizes of a batch: in dicts by name, in tuples by place; other parts are not padded."""
    new, longest = MAKERS[make], [-(-max(each) // 4) * 4 for each in zip(*lengths, strict=True)]
    samples = [{"soft": ones(5), "chosen": new(a), "rejected": new(b)} for a, b in lengths]
    batch = pad_collate(-1, parts=("chosen", "rejected"), multiple_of=4)(samples)
    assert list(batch) == ["soft", "chosen", "rejected", "chosen_mask", "rejected_mask"]
    found = pad_collate(-1, parts=(2, 1), multiple_of=4)([tuple(sample.values()) for sample in samples])
    for one in ([*batch.values()], [*found[:3], found[4], found[3]]):
        assert [tuple(part.shape[1:]) for part in one] == [(5,), *((size,) for size in longest + longest)]
        for at in (0, 1):
            assert one[3 + at].sum(1).tolist() == [each[at] for each in lengths]
            assert torch.equal(one[1 + at] == 1, one[3 + at].bool())
    single = pad_collate(parts=("chosen",))([{"chosen": new(a)} for a, _ in lengths])
    assert list(single) == ["chosen", "attention_mask"]


def test_what_is_padded_does_not_depend_on_the_batch() -> None:
    """A part that is as long as the sequence by chance is not padded, and never gives the mask."""
    for size in (5, 7, 8, 9):
        texts = [{"soft": ones(8), "image": ones(8, 2, 2), "ids": ones(n)} for n in (8, size)]
        for collate in (pad_collate({"ids": 0}, multiple_of=16), pad_collate(parts=("ids",), multiple_of=16)):
            batch = collate(texts)
            assert [*map(tuple, (batch["soft"].shape, batch["image"].shape))] == [(2, 8), (2, 8, 2, 2)]
            assert batch["attention_mask"].sum(1).tolist() == [8, size]
            assert batch["ids"].shape == (2, 16)


def test_parts_of_one_dimension_have_lengths_of_their_own() -> None:
    """Without names, too; the mask is that of the first one."""
    batch = pad_collate(-1)([{"prompt": [1] * a, "answer": [1] * b} for a, b in ((2, 5), (3, 1))])
    assert {name: tuple(part.shape) for name, part in batch.items()} == {
        "prompt": (2, 3),
        "answer": (2, 5),
        "attention_mask": (2, 3),
    }
    tokens, mask = pad_collate()([[1, 2], [], [3]])
    assert tokens.tolist() == [[1, 2], [0, 0], [3, 0]]
    assert mask.sum(1).tolist() == [2, 0, 1]
    sized = pad_collate()([{"ids": ones(n), "size": [4, 5]} for n in (1, 2)])
    assert [part.tolist() for part in sized["size"]] == [[4, 4], [5, 5]]


@pytest.mark.parametrize("lengths", [(5,), (5, 5), (5, 7)])
@pytest.mark.parametrize(
    ("sample", "options", "names"),
    [
        (lambda n: {"image": ones(3, 2, 2), "ids": ones(n)}, {}, "('ids',)"),
        (lambda n: (ones(3, 2, 2), ones(n, 4)), {}, "(1,)"),
        (lambda n: {"ids": ones(n), "soft": ones(9)}, {"multiple_of": 8}, "('ids'"),
        (lambda n: {"ids": [1] * n, "soft": [1] * 9}, {"multiple_of": 8}, "('ids'"),
        (lambda n: (ones(n), ones(n)), {"value": [0, 1], "multiple_of": 8}, "(0, 1)"),
    ],
)
def test_parts_that_are_not_certain_are_an_error(sample: Any, options: Any, names: str, lengths: Any) -> None:
    """In each batch, whatever its sizes; the message has the line to write."""
    with pytest.raises(TypeError, match=re.escape(f"pad_collate(parts={names}")):
        pad_collate(**options)([sample(n) for n in lengths])


@pytest.mark.parametrize(
    ("sample", "options", "names"),
    [
        (lambda n: {"soft": ones(8), "ids": ones(n)}, {}, "('ids',)"),
        (lambda n: {"ids": ones(n), "spans": [1] * n}, {}, "('ids', 'spans')"),
        (lambda n: {"ids": ones(n), "masks": ones(n + 1, 4)}, {}, "('ids', 'masks')"),
        (lambda n: {"ids": ones(n), "labels": ones(n)}, {"parts": ["ids"]}, "('ids', 'labels')"),
        (
            lambda n: {"ids": ones(n), "labels": ones(n)},
            {"value": {"labels": 1}, "multiple_of": 8},
            "('ids', 'labels')",
        ),
    ],
)
def test_a_batch_that_contradicts_is_an_error(sample: Any, options: Any, names: str) -> None:
    """Another part has different lengths; the message has the line to write."""
    with pytest.raises(TypeError, match=re.escape(f"pad_collate(parts={names}")):
        pad_collate(**options)([sample(n) for n in (2, 3)])


def test_it_can_be_pickled() -> None:
    """For worker processes."""
    copy = pickle.loads(pickle.dumps(pad_collate(1, parts=["x"], side="left", multiple_of=8)))
    assert copy == pad_collate(1, parts=("x",), side="left", multiple_of=8)


def test_wrong_input_is_refused() -> None:
    """The message has the argument or the way out."""
    with pytest.raises(ValueError, match='"right" or "left"'):
        pad_collate(side="top")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple_of"):
        pad_collate(multiple_of=0)
    with pytest.raises(TypeError, match="leave collate_fn= out"):
        pad_collate()([1, 2])
    for parts in ("ids", (), ("ids", "ids"), 3):
        with pytest.raises(TypeError, match=r"parts=\(\"input_ids\",\)"):
            pad_collate(parts=parts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name them in both"):
        pad_collate({"labels": -1}, parts=("ids",))
    for name in ("absent", "text"):
        with pytest.raises(TypeError, match=rf"parts=\('{name}',\)\) needs .*these are \['ids'\]"):
            pad_collate(parts=(name,))([{"ids": torch.ones(2), "text": "a"}])
    with pytest.raises(TypeError, match="'x' has the shapes"):
        pad_collate()([{"x": torch.ones(n, n)} for n in (1, 2)])


# --- Pack ---

# Two rows of four tokens: a document of 3 tokens; token 1 of one of 2 tokens, and a separator.
PIECES = np.array([[0, 0, 0, 3, 3], [1, 4, 1, 3, 2]])


def packed(*samples: Any, pad: Any = -1, separator: Any = 9) -> Any:
    builder = PackCollate(2, 4, separator, pad).new_builder(BatchPlan(0, [5, 6], [0, 1], 0, pieces=PIECES), lease())
    for position, sample in enumerate(samples):
        builder.put(position, sample)
    return as_tensors(builder.finish(["five", "six"]))


def lease() -> Any:
    return HostBufferPool(0).lease()


@pytest.mark.parametrize(
    "make",
    [
        lambda *tokens: list(tokens),
        lambda *tokens: torch.tensor(tokens),
        lambda *tokens: torch.tensor(tokens, dtype=torch.int32),
        lambda *tokens: np.array(tokens, np.int16),
        lambda *tokens: np.array([tokens, tokens])[0],
        lambda *tokens: torch.tensor([[token, 0] for token in tokens])[:, 0],
    ],
)
def test_pieces_are_copied_to_their_places(make: Any) -> None:
    """Of tensors, arrays and lists; tokens have the documents' dtype."""
    document = make(1, 2, 3)
    batch = packed(document, make(7, 8))
    assert batch["tokens"].tolist() == [[1, 2, 3, -1], [8, 9, -1, -1]]
    assert batch["tokens"].dtype == torch.as_tensor(document).dtype
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, -1], [1, 1, -1, -1]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 6, 8]
    assert batch["cu_seqlens"].dtype is torch.int32
    assert batch["max_seqlen"] == 3
    assert all(value.is_contiguous() for name, value in batch.items() if name != "max_seqlen")


def test_columns_are_packed_alike() -> None:
    """Each with its padding and separator; of any dtype and further dimensions."""

    def document(*tokens: int) -> dict[str, Any]:
        return {
            "input_ids": list(tokens),
            "labels": torch.tensor(tokens),
            "weights": np.ones(len(tokens), np.float32) / 2,
            "frames": np.ones((len(tokens), 3), np.float64),
            "mask": torch.ones(len(tokens), dtype=torch.bool),
        }

    separator = {"input_ids": 9, "labels": -100, "weights": 0.25, "frames": 2, "mask": 1}
    batch = packed(document(1, 2, 3), document(7, 8), pad={"labels": -5}, separator=separator)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [8, 9, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, -5], [8, -100, -5, -5]]
    assert batch["weights"].tolist() == [[0.5, 0.5, 0.5, 0], [0.5, 0.25, 0, 0]]
    assert batch["frames"].shape == (2, 4, 3)
    assert batch["frames"][1, :, 0].tolist() == [1, 2, 0, 0]
    assert batch["mask"].tolist() == [[True, True, True, False], [True, True, False, False]]
    assert list(batch)[-4:] == ["position_ids", "document_ids", "cu_seqlens", "max_seqlen"]


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        (([1, 2],), {}, r"the document 'five' has 2 tokens, and Pack\(lengths=\) has 3"),
        (([1, 2, 3, 4],), {}, "has 4 tokens"),
        (([],), {}, "has 0 tokens"),
        (([1, 2, 3], [1]), {}, "'six' has 1 tokens"),
        (({"a": [1, 2, 3], "b": [1]},), {}, "has 1 b"),
        (
            ((torch.ones(3), 1),),
            {},
            "has tokens in a tuple: Pack takes a tensor, an array or a list of ints, or a dict",
        ),
        (("abc",), {}, "tokens in a str"),
        (([1.0, 2, 3],), {}, "tokens in a list"),
        (([[1], [2], [3]],), {}, "tokens in a list"),
        ((torch.tensor(3),), {}, "tokens in a Tensor"),
        ((torch.ones(3, dtype=torch.bfloat16),), {}, "tokens in a bfloat16 tensor"),
        (({"a": [1, 2, 3], "name": "x"},), {}, "has name in a str"),
        (({},), {}, "has no columns"),
        (({"a": [1, 2, 3]}, {"b": [1, 2]}), {}, r"columns \['b'\], and another one \['a'\]"),
        (([1, 2, 3], torch.ones(2, dtype=torch.int32)), {}, r"tokens of \['int32'\], and another one of \['int64'\]"),
        ((np.ones((3, 2)), np.ones((2, 3))), {}, r"\['float64', 3\], and another one of \['float64', 2\]"),
        (({"position_ids": [1, 2, 3]},), {}, "'position_ids', which Pack makes itself"),
        ((np.ones(3, np.uint16),), {}, r"has uint16, which cannot hold Pack\(pad=-1\)"),
        (([1, 2, 3],), {"separator": 0.5}, r"has int64, which cannot hold Pack\(separator=0.5\)"),
        (({"a": [1, 2, 3]},), {"separator": {"b": 1}}, r"has a, for which Pack\(separator=\) has no token"),
    ],
)
def test_documents_that_do_not_fit(samples: Any, options: Any, message: str) -> None:
    """The error names the document and what was planned; it is one of the batch, which on_error="skip" never hides."""
    builder = PackBatchBuilder(
        PackCollate(2, 4, **{"separator": 9, "pad": -1, **options}),
        BatchPlan(0, [5, 6], [0, 1], 0, pieces=PIECES),
        lease(),
    )
    with pytest.raises(MisfitError) as raised:
        for position, sample in enumerate(samples):
            builder.put(position, sample)
    error = misfit_error(raised.value, ["five", "six"][len(samples) - 1])
    assert error is not None
    assert re.search(message, str(error)), str(error)


def test_a_packer_can_be_pickled() -> None:
    """Worker processes get it."""
    packer = PackCollate(2, 4, {"a": 1}, 0)
    assert pickle.loads(pickle.dumps(packer)) == packer
