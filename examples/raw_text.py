"""A small language model from raw text: shards at URLs, tokenised on the fly and packed, with 8 ranks, 2, and 8 again.

    python examples/raw_text.py
    python examples/raw_text.py s3://bucket/0.jsonl s3://bucket/1.jsonl --tokenizer tokenizer.json

A shard is a file of JSON Lines with a "text" in each. Nothing is known before: the shards are read and tokenised while
the model trains, and documents are packed as they come. Twice in the epoch the training is saved and goes on with
another number of ranks, from the state of any of them. At the end the example shows that all batches are those of one
uninterrupted rank, and that they have each token of each document once.

Without URLs, the example serves documentation of Python on loopback. Needs `pip install "aiofeed[objects]" tokenizers`.
The ranks are feeders of one process here. In a training under torchrun each process makes one, without `shard=`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import json
import pydoc_data.topics
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn.functional import cross_entropy

import aiofeed

CONTEXT, ROWS, WIDTH, HEADS = 128, 4, 64, 4
BATCHES = 8  # of a step, whatever the number of ranks
END = "[END]"  # the token after each document


class Documents:
    """Documents of JSON Lines shards as tokens, each token with the number of its document.

    The shards are read ahead and tokenised in the threads of a feeder of their own. A resume begins at a shard.
    """

    def __init__(self, urls: Sequence[str], tokenizer: Tokenizer, options: dict[str, Any]) -> None:
        self.urls, self.tokenizer, self.options = urls, tokenizer, options
        self.start = self.next = (0, 0)  # a shard, and a line in it

    def state_dict(self) -> dict[str, Any]:
        return {"next": list(self.next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = tuple(state["next"])

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        (shard, line), self.start = self.start, (0, 0)
        end = self.tokenizer.token_to_id(END)
        with read_shards(self.urls[shard:], self.tokenised, self.options) as shards:
            for shard, texts in enumerate(shards, shard):  # noqa: B020 - counts from the shard of the state
                for number in range(line, len(texts)):
                    self.next = shard, number + 1
                    tokens = [*texts[number], end]
                    yield {"tokens": tokens, "document": [1_000_000 * shard + number] * len(tokens)}
                line = 0

    def tokenised(self, shard: bytes) -> list[list[int]]:
        return [text.ids for text in self.tokenizer.encode_batch(texts_of(shard))]


def texts_of(shard: bytes) -> list[str]:
    return [json.loads(line)["text"] for line in shard.splitlines()]


def read_shards(urls: Sequence[str], decode: Any, options: dict[str, Any]) -> aiofeed.Feeder[Any]:
    files = aiofeed.Files(urls, options=options)
    return aiofeed.Feeder(files, decode=decode, batch_size=1, collate_fn=lambda shards: shards[0], shard=None)


def new_feeder(documents: Documents, shard: tuple[int, int] | None) -> aiofeed.Feeder[dict[str, torch.Tensor]]:
    pad = {"tokens": documents.tokenizer.token_to_id(END), "document": -1}
    plan = aiofeed.Pack(context=CONTEXT, rows=ROWS, pad=pad, length="tokens")
    return aiofeed.Feeder(aiofeed.Stream(documents, shuffle_buffer=64), batch_size=plan, shard=shard)


def new_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A tokenizer of bytes and a few hundred frequent pieces, trained on these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Model(nn.Module):
    """One layer of attention; tokens see the tokens before them in their own document."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of the next token in the same document."""
        tokens, documents = batch["tokens"], batch["document_ids"]
        sees = (documents[:, :, None] == documents[:, None, :]).tril().repeat_interleave(HEADS, 0)
        state = self.layer(self.tokens(tokens) + self.places(batch["position_ids"]), src_mask=~sees)
        follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        return cross_entropy(self.head(state[:, :-1])[follows], tokens[:, 1:][follows])


def train(ranks: int, most: int | None, saved: dict[str, Any], new_documents: Any) -> list[torch.Tensor]:
    """Train for so many steps, or to the end of the epoch, from a checkpoint, which is replaced; returns the batches.

    A step has the gradients of eight batches: those of one step of eight ranks, or of four steps of two.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model(new_documents().tokenizer.get_vocab_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    seen: list[torch.Tensor] = []
    with contextlib.ExitStack() as stack:
        feeders = [stack.enter_context(new_feeder(new_documents(), (rank, ranks))) for rank in range(ranks)]
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            for feeder in feeders:
                feeder.load_state_dict(saved["feeder"])
        for step, batches in enumerate(zip(*feeders, strict=True), 1):
            for batch in batches:
                loss = model(batch)
                (loss / BATCHES).backward()
                losses.append(loss.item())
                seen.append(torch.stack([batch["document"], batch["tokens"]]))
            if len(seen) % BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()
            if most is not None and step * ranks == most * BATCHES:
                break
        saved |= {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "feeder": feeders[-1].state_dict()}
    first, last = sum(losses[:BATCHES]) / BATCHES, sum(losses[-BATCHES:]) / BATCHES
    print(f"{ranks} ranks, {len(losses)} batches: loss {first:.2f} to {last:.2f}")
    return seen


def tokens_by_document(batches: Sequence[torch.Tensor]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for batch in batches:
        for number, token in batch.flatten(1).T.tolist():
            found[number].append(token)
    found.pop(-1, None)  # padding
    return {number: sorted(tokens) for number, tokens in found.items()}


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a line for each request."""

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served_shards() -> Iterator[list[str]]:
    """The URLs of shards with paragraphs of Python's documentation, on loopback."""
    texts = [part for text in pydoc_data.topics.topics.values() for part in text.split("\n\n") if part.strip()][:1500]
    with tempfile.TemporaryDirectory() as folder:
        for shard in range(6):
            lines = [json.dumps({"text": text}) for text in texts[shard::6]]
            Path(folder, f"{shard}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        handler = functools.partial(Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield [f"http://127.0.0.1:{server.server_port}/{shard}.jsonl" for shard in range(6)]
            server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="*", metavar="URL", help="JSON Lines shards")
    parser.add_argument("--endpoint", help="of another object store than that of AWS")
    parser.add_argument("--tokenizer", help="a file of the package tokenizers; default: trained on the first shard")
    parser.add_argument("--steps", type=int, default=10, help="steps before the number of ranks changes")
    arguments = parser.parse_args()
    options = {"endpoint": arguments.endpoint} if arguments.endpoint else {}
    with contextlib.ExitStack() as stack:
        urls = arguments.urls or stack.enter_context(served_shards())
        if arguments.tokenizer:
            tokenizer = Tokenizer.from_file(arguments.tokenizer)
        else:
            with read_shards(urls[:1], texts_of, options) as first:
                tokenizer = new_tokenizer(next(iter(first)))
        new_documents = functools.partial(Documents, urls, tokenizer, options)
        saved: dict[str, Any] = {}
        seen: list[torch.Tensor] = []
        for ranks, most in ((8, arguments.steps), (2, arguments.steps), (8, None)):
            seen += train(ranks, most, saved, new_documents)
        with new_feeder(new_documents(), None) as whole:
            expected = [torch.stack([batch["document"], batch["tokens"]]) for batch in whole]
        documents = {each["document"][0]: sorted(each["tokens"]) for each in new_documents()}
    padding = [expected[-1]] * (len(seen) - len(expected))  # the last step has a batch for each rank
    same = all(torch.equal(one, other) for one, other in zip(seen, expected + padding, strict=True))
    print(f"the batches are those of one uninterrupted rank: {same}")
    once = tokens_by_document(expected) == documents
    print(f"{len(documents):,} documents of {len(urls)} shards, each token once: {once}")


if __name__ == "__main__":
    main()
