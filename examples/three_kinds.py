"""A small language model on three kinds of sources in one mixture: a file of tokens, a table and texts.

    python examples/three_kinds.py

Documentation of Python is a file of tokens as nanoGPT has it, its source code a Parquet file with a list of tokens in
each row, and questions with answers are JSON Lines, which a tokenizer turns into tokens in threads while the model
trains. The weights are shares of the tokens, though a sample of one kind is many times as long as one of another. The
training stops halfway, and goes on with the batches of a training that did not stop. Needs `pip install
"aiofeed[parquet]"`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import json
import pydoc
import pydoc_data.topics
import statistics
import tempfile
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import nn
from torch.nn.functional import cross_entropy

import aiofeed

BLOCK, BATCH_SIZE, WIDTH = 128, 16, 96
END = 256  # the token after each text; the others are bytes
WEIGHTS = {"docs": 0.5, "code": 0.3, "help": 0.2}
MODULES = (argparse, ast, difflib, inspect, json, pydoc, statistics, tempfile, textwrap)


def tokens_of(text: str) -> list[int]:
    return [*text.encode(), END]


def tokenise(row: dict[str, str]) -> dict[str, torch.Tensor]:
    """The user's tokenizer: a row of the JSON Lines as tokens."""
    return {"input_ids": torch.tensor(tokens_of(f"{row['question']} {row['answer']}"))}


def prepare(folder: Path) -> None:
    """Write the three kinds of files, from what every Python has."""
    docs = [token for text in pydoc_data.topics.topics.values() for token in tokens_of(text)]
    np.array(docs, np.uint16).tofile(folder / "docs.bin")
    code, questions = [], []
    for module in MODULES:
        for name, value in inspect.getmembers(module, inspect.isfunction):
            code.append(tokens_of(inspect.getsource(value))[:BLOCK])
            if answer := (inspect.getdoc(value) or "").partition("\n")[0]:
                questions.append({"question": f"What does {module.__name__}.{name} do?", "answer": answer})
    parquet.write_table(pa.table({"input_ids": pa.array(code, pa.list_(pa.int64()))}), folder / "code.parquet")
    (folder / "help.jsonl").write_text("\n".join(map(json.dumps, questions)), encoding="utf-8")


def new_feeder(folder: Path) -> aiofeed.Feeder[dict[str, Any]]:
    docs, texts = aiofeed.Tokens(folder / "docs.bin", block=BLOCK), aiofeed.Table(folder / "help.jsonl")
    mixture = aiofeed.Mixture(
        {"docs": docs, "code": aiofeed.Table(folder / "code.parquet"), "help": texts},
        WEIGHTS,
        until=4_000,
        decode={"docs": lambda tokens: {"input_ids": tokens}, "help": tokenise},
        names=True,
        unit="tokens",
        # The table knows how long its lists are. What decode= returns is measured here.
        lengths={"docs": [BLOCK] * len(docs), "help": [len(tokenise(row)["input_ids"]) for row in rows_of(texts)]},
    )
    return aiofeed.Feeder(mixture, batch_size=BATCH_SIZE, collate_fn=aiofeed.pad_collate(value=END), shuffle=True)


def rows_of(table: aiofeed.Table) -> list[dict[str, str]]:
    with aiofeed.Feeder(table, batch_size=1, collate_fn=lambda rows: rows[0], shard=None) as rows:
        return list(rows)


class Model(nn.Module):
    """A recurrent network that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(END + 1, WIDTH)
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, END + 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token but the first: ``(rows, tokens - 1)``."""
        state, _ = self.layer(self.tokens(tokens[:, :-1]))
        losses = cross_entropy(self.head(state).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return losses.view(len(tokens), -1)


def train(model: Model, optimizer: torch.optim.Optimizer, batches: Any, seen: list[int]) -> None:
    """Train on batches; print the mean loss and the share of the tokens of each source."""
    sums: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    for batch in batches:
        mask = batch["attention_mask"][:, 1:]
        losses = model(batch["input_ids"]) * mask
        optimizer.zero_grad()
        (losses.sum() / mask.sum()).backward()
        optimizer.step()
        seen.append(int(batch["input_ids"].sum()))
        for name, loss, length in zip(batch["source"], losses.sum(1) / mask.sum(1), mask.sum(1), strict=True):
            sums[name].append(loss.item())
            counts[name] += int(length) + 1
    for name in WEIGHTS:
        share, loss = counts[name] / sum(counts.values()), sum(sums[name]) / len(sums[name])
        print(f"  {name}: {len(sums[name])} samples, {share:.0%} of the tokens, loss {loss:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="of the whole training")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[int] = []
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        with new_feeder(Path(name)) as feeder:
            print("the first half:")
            train(model, optimizer, feeder.steps(steps // 2), seen)
            state = feeder.state_dict()
        with new_feeder(Path(name)) as feeder:
            feeder.load_state_dict(state)
            print("the second half, resumed:")
            train(model, optimizer, feeder.steps(steps - steps // 2), seen)
        with new_feeder(Path(name)) as whole:
            expected = [int(batch["input_ids"].sum()) for batch in whole.steps(steps)]
    print(f"the batches are those of one uninterrupted training: {seen == expected}")


if __name__ == "__main__":
    main()
