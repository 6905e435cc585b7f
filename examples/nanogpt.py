"""nanoGPT's training loop with a feeder in the place of its get_batch: shuffled without repeats, and resumable.

    python examples/nanogpt.py
    python examples/nanogpt.py --device cuda --steps 2000

prepare() writes train.bin and val.bin as nanoGPT's data/shakespeare_char/prepare.py does: uint16, one token per
character; here of Python's manual. A training stops in the middle, saves a checkpoint, and is resumed from it. Its
batches are those of a training that was not stopped.

nanoGPT's get_batch draws each window at random: after as many windows as the file has, a third of the text was not in
any. It draws from torch's global generator, whose state is not in the checkpoint.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import aiofeed

BLOCK_SIZE, BATCH_SIZE, WIDTH, HEADS, LAYERS = 64, 12, 64, 4, 2
EVAL_ITERS = 20


def prepare(folder: Path) -> int:
    """Write the tokens of a text; return the number of different ones."""
    text = "\n".join(pydoc_data.topics.topics.values())
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    tokens = np.array([numbers[character] for character in text], dtype=np.uint16)
    split = int(0.9 * len(tokens))
    tokens[:split].tofile(folder / "train.bin")
    tokens[split:].tofile(folder / "val.bin")
    return len(characters)


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.norms[0](x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(mixed)
        out: torch.Tensor = x + self.mlp(self.norms[1](x))
        return out


class GPT(nn.Module):
    """A transformer of characters."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(BLOCK_SIZE, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the targets."""
        state = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(state)))
        return cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))


def new_feeder(path: Path, device: Any, **options: Any) -> aiofeed.Feeder[list[torch.Tensor]]:
    tokens = aiofeed.Tokens(path, BLOCK_SIZE, targets=True)
    return aiofeed.Feeder(tokens, batch_size=BATCH_SIZE, drop_last=True, device=device, **options)


@torch.no_grad()
def estimate_loss(model: nn.Module, folder: Path, device: Any) -> float:
    """Return the mean loss of the same batches of val.bin each time."""
    model.eval()
    with new_feeder(folder / "val.bin", device, shuffle=True) as feeder:
        losses = [model(x, y).item() for x, y in feeder.steps(EVAL_ITERS)]
    model.train()
    return sum(losses) / len(losses)


def train(folder: Path, vocabulary: int, device: Any, first: int, last: int, total: int) -> list[int]:
    """Train from step ``first``, with the checkpoint unless it is 0, to ``last``; return a sum of each batch."""
    torch.manual_seed(1337)
    model = GPT(vocabulary).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    seen = []
    with new_feeder(folder / "train.bin", device, shuffle=True, seed=1337) as feeder:
        if first:
            saved = torch.load(folder / "ckpt.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            feeder.load_state_dict(saved["feeder"])
        started = time.perf_counter()
        for step, (x, y) in enumerate(feeder.steps(last - first), first):
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * step / total)))
            loss = model(x, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            seen.append(int(x.sum() + y[:, -1].sum()))
        rate = len(seen) * BATCH_SIZE * BLOCK_SIZE / (time.perf_counter() - started)
        print(
            f"steps {first} to {last}, epoch {feeder.epoch}: train loss {loss.item():.3f}, "
            f"val loss {estimate_loss(model, folder, device):.3f}, {rate:,.0f} tokens/s"
        )
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "feeder": feeder.state_dict()}
        torch.save(state, folder / "ckpt.pt")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where the model trains (default: cpu)")
    parser.add_argument("--steps", type=int, default=80, help="steps of the training (default: 80)")
    given = parser.parse_args()
    half = given.steps // 2
    if given.device == "cpu":
        torch.set_num_threads(1)  # more threads have no work with so small a model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary = prepare(folder)
        print(f"{(folder / 'train.bin').stat().st_size // 2:,} tokens, {vocabulary} different ones")
        before = train(folder, vocabulary, given.device, 0, half, given.steps)
        after = train(folder, vocabulary, given.device, half, given.steps, given.steps)
        with new_feeder(folder / "train.bin", None, shuffle=True, seed=1337) as feeder:
            expected = [int(x.sum() + y[:, -1].sum()) for x, y in feeder.steps(given.steps)]
    print(f"the batches are those of one uninterrupted training: {before + after == expected}")


if __name__ == "__main__":
    main()
