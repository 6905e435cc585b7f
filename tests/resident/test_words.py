"""Rows of tensors as integers: for gathers on a device."""

import pytest
import torch

from aiofeed.resident.device_windows import rows_as_words, words_as_rows

DTYPES = [
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
]


def random_rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Rows with random bytes, without NaNs for comparison: the bytes are compared."""
    count = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return values.view(dtype).view(shape)


def as_bytes(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 3), (3, 8), (0,), (4, 0)])
def test_gathered_words_are_the_gathered_rows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """For every dtype and row size, a gather of words gives the bytes, shape and dtype of a gather of rows."""
    rows = random_rows(dtype, 7, *shape)
    indices = torch.tensor([5, 0, 6, 5])
    words = rows_as_words(rows)
    nbytes = rows[0].nbytes
    assert words.data_ptr() == rows.data_ptr()
    if nbytes:
        assert words.itemsize == max(size for size in (1, 2, 4, 8) if nbytes % size == 0)
    found = words_as_rows(words.index_select(0, indices), shape, dtype)
    assert (found.shape, found.dtype) == ((4, *shape), dtype)
    assert as_bytes(found) == [byte for index in indices.tolist() for byte in as_bytes(rows[index])]
    assert words_as_rows(words[:0], shape, dtype).shape == (0, *shape)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128])
def test_no_rows(dtype: torch.dtype) -> None:
    """An empty tensor has words, too."""
    rows = torch.empty(0, 8, dtype=dtype)
    assert words_as_rows(rows_as_words(rows), (8,), dtype).shape == (0, 8)


@pytest.mark.parametrize(("first", "size"), [(0, 8), (1, 1), (2, 2), (4, 4), (6, 2), (8, 8)])
def test_words_are_aligned(first: int, size: int) -> None:
    """Rows that begin inside a word of their storage are read as smaller words."""
    memory = torch.arange(64, dtype=torch.uint8)
    rows = memory[first : first + 48].view(3, 16)
    words = rows_as_words(rows)
    assert words.itemsize == size
    assert torch.equal(words_as_rows(words, (16,), torch.uint8), rows)
