"""A small transformer on packed text from a mixture, stopped and resumed with another number of processes.

    python examples/packed_text.py

Two kinds of text, prose and code, are drawn by weight and packed into rows of 256 bytes. Two processes train for 20
steps and save a checkpoint. One process resumes it, with two batches per step in place of two processes, and gets the
batches that the two processes would have got.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import aiofeed

CONTEXT, ROWS, STEPS, WIDTH = 256, 4, 20, 64
END = 256  # the token after each document; the others are bytes
WEIGHTS = {"prose": 0.7, "code": 0.3}


class Texts(torch.utils.data.Dataset[torch.Tensor]):
    """Texts as tokens: one token per byte."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = [text.encode() for text in texts if text.strip()]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.texts[index]), dtype=torch.uint8).long()


def new_feeder(**options: Any) -> aiofeed.Feeder[dict[str, torch.Tensor]]:
    library = Path(sysconfig.get_path("stdlib"))
    texts = {
        "prose": list(pydoc_data.topics.topics.values()),
        "code": [(library / name).read_text(encoding="utf-8") for name in ("argparse.py", "textwrap.py", "heapq.py")],
    }
    sources = {
        name: Texts([part for text in of_kind for part in text.split("\n\n")]) for name, of_kind in texts.items()
    }
    lengths = [len(text) for source in sources.values() for text in source.texts]
    return aiofeed.Feeder(
        aiofeed.Mixture(sources, WEIGHTS),
        batch_size=aiofeed.Pack(lengths, CONTEXT, rows=ROWS, separator=END, pad=END),
        shuffle=True,
        **options,
    )


class Transformer(nn.Module):
    """Two layers of attention; tokens see the tokens before them in their own document."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(END + 1, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(4)])
        self.inputs = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.outputs = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.feeds = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)]
        )
        self.head = nn.Linear(WIDTH, END + 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of the next token in the same document."""
        tokens, documents = batch["tokens"], batch["document_ids"]
        # On a GPU, flash attention takes batch["cu_seqlens"] and batch["max_seqlen"] instead of this mask.
        sees = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        state = self.tokens(tokens) + self.places(batch["position_ids"])
        for layer in range(2):
            parts = self.inputs[layer](self.norms[2 * layer](state)).chunk(3, -1)
            query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
            mixed = scaled_dot_product_attention(query, key, value, attn_mask=sees).transpose(1, 2).flatten(2)
            state = state + self.outputs[layer](mixed)
            state = state + self.feeds[layer](self.norms[2 * layer + 1](state))
        follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        return cross_entropy(self.head(state[:, :-1])[follows], tokens[:, 1:][follows])


def train(rank: int, world_size: int, folder: str) -> None:
    """Train for STEPS steps of two batches, in one process or two, from the checkpoint if there is one."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoint = Path(folder, "checkpoint.pt")
    with new_feeder(shard=(rank, world_size)) as feeder:
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            feeder.load_state_dict(saved["feeder"])
        net: nn.Module = model
        if world_size > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            torch.distributed.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=world_size)
            net = DistributedDataParallel(model)
        together = 2 // world_size
        losses, seen, started = [], [], time.perf_counter()
        for number, batch in enumerate(feeder.steps(STEPS * together)):
            loss = net(batch)
            (loss / together).backward()
            losses.append(loss.item())
            seen.append(int(batch["tokens"].sum()))
            if number % together == together - 1:
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            rate = ROWS * CONTEXT * len(seen) * world_size / (time.perf_counter() - started)
            drawn = ", ".join(f"{name} {count}" for name, count in feeder.statistics().by_source.items())
            first, last = sum(losses[:4]) / 4, sum(losses[-4:]) / 4
            print(f"{world_size} processes: loss {first:.2f} to {last:.2f}, {rate:,.0f} tokens/s; drawn: {drawn}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "feeder": feeder.state_dict()}
            torch.save(state, checkpoint)
    Path(folder, f"seen-{world_size}-{rank}.json").write_text(json.dumps(seen))
    if world_size > 1:
        torch.distributed.destroy_process_group()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, args=(2, folder), nprocs=2)
        train(0, 1, folder)
        ranks = [json.loads(Path(folder, f"seen-2-{rank}.json").read_text()) for rank in range(2)]
        after = json.loads(Path(folder, "seen-1-0.json").read_text())
    with new_feeder(shard=None) as whole:
        expected = [int(batch["tokens"].sum()) for batch in whole.steps(4 * STEPS)]
    before = [seen for pair in zip(*ranks, strict=True) for seen in pair]
    print(f"the batches are those of one uninterrupted process: {before + after == expected}")


if __name__ == "__main__":
    main()
