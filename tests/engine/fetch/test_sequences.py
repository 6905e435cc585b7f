"""``pad_collate``: shapes, values, sides, masks."""

from __future__ import annotations

import pickle
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from aiofeed import pad_collate


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


def test_it_can_be_pickled() -> None:
    """For worker processes."""
    copy = pickle.loads(pickle.dumps(pad_collate(1, side="left", multiple_of=8)))
    assert copy == pad_collate(1, side="left", multiple_of=8)


def test_wrong_input_is_refused() -> None:
    """The message has the argument or the way out."""
    with pytest.raises(ValueError, match='"right" or "left"'):
        pad_collate(side="top")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple_of"):
        pad_collate(multiple_of=0)
    with pytest.raises(TypeError, match="leave collate_fn= out"):
        pad_collate()([1, 2])
