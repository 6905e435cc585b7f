"""A linear classifier learns the types of cells from rows of a sparse matrix in a file of AnnData.

The script generates the counts of 2,000 genes in 20,000 cells of eight types, and writes them as `AnnData.write_h5ad`
does: a matrix in compressed rows, and a column of categories. Rows come as dense tensors, types as numbers. The second
training takes the same rows as sparse tensors, of which a batch has a tenth of the bytes. Needs
`pip install "aiofeed[arrays]"`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

import aiofeed

CELLS, GENES, TYPES, BATCH_SIZE = 20_000, 2_000, 8, 256


def write_cells(path: Path, numbers: np.random.Generator) -> None:
    """Write cells, of whose genes about 5 % have counts; each type has 40 genes that are more active."""
    types = numbers.integers(TYPES, size=CELLS)
    activity = np.tile(numbers.gamma(0.5, 0.1, GENES), (TYPES, 1))
    for number in range(TYPES):
        activity[number, numbers.choice(GENES, 40, replace=False)] += 0.25
    rows = numbers.poisson(activity[types]).astype(np.float32)
    cells, columns = np.nonzero(rows)
    starts = np.searchsorted(cells, np.arange(CELLS + 1))
    parts = {"data": rows[cells, columns], "indices": columns.astype(np.int32), "indptr": starts}
    with h5py.File(path, "w") as file:
        matrix = file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [CELLS, GENES]})
        for name, values in parts.items():
            matrix.create_dataset(name, data=values, chunks=(1 << 14,), compression="gzip")
        column = file.create_group("obs/cell_type")
        column.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
        column["codes"] = types.astype(np.int8)
        column["categories"] = [f"type {number}" for number in range(TYPES)]


def train(feeder: aiofeed.Feeder[dict[str, torch.Tensor]], epochs: int) -> nn.Linear:
    """Return a classifier of logarithms of counts."""
    torch.manual_seed(0)
    model = nn.Linear(GENES, TYPES)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(epochs):
        started, losses = time.perf_counter(), []
        for batch in feeder:
            loss = nn.functional.cross_entropy(logits(model, batch["x"]), batch["y"].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        rate = len(losses) * BATCH_SIZE / (time.perf_counter() - started)
        print(f"epoch {epoch}: {rate:.0f} cells/s, loss {losses[0]:.2f} to {losses[-1]:.2f}")
    return model


def logits(model: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """Apply the model to rows, dense or sparse."""
    if rows.layout == torch.sparse_csr:
        values = rows.values().log1p()
        rows = torch.sparse_csr_tensor(
            rows.crow_indices(), rows.col_indices(), values, rows.shape, check_invariants=False
        )
        return rows @ model.weight.T + model.bias
    return model(rows.log1p())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the other core loads data
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "cells.h5ad")
        write_cells(path, np.random.default_rng(0))
        arrays = {"x": f"{path}::X", "y": f"{path}::obs/cell_type"}
        for sparse in ("dense", "csr"):
            cells = aiofeed.Arrays(arrays, sparse=sparse)
            parts = cells.split({"train": 0.9, "test": 0.1})
            print(f"{sparse}: {parts['train']}, {', '.join(cells.categories['y'])}")
            with aiofeed.Feeder(parts["train"], batch_size=BATCH_SIZE, shuffle="window", drop_last=True) as feeder:
                model = train(feeder, options.epochs)
            right = 0
            with aiofeed.Feeder(parts["test"], batch_size=BATCH_SIZE) as feeder, torch.no_grad():
                for batch in feeder:
                    right += int((logits(model, batch["x"]).argmax(1) == batch["y"]).sum())
            print(f"accuracy on other cells: {right / len(parts['test']):.1%}")


if __name__ == "__main__":
    main()
