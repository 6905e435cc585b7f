"""A training loop in asyncio that answers HTTP requests for its progress.

    python examples/async_training.py    and, in another terminal: curl http://127.0.0.1:PORT/progress
    python examples/async_training.py --self-test

The samples come from a simulated store with a latency of 20 ms that serves many requests at a time. aiofeed reads and
decodes in threads of its own, and each step runs in another thread, so this program's event loop is free to answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn

import aiofeed

FEATURES = 256


class Store:
    """A simulated object store: a sample is ``FEATURES`` numbers and the target to predict from them."""

    def __init__(self, samples: int, latency_s: float = 0.02) -> None:
        self.samples, self.latency_s = samples, latency_s
        self.weights = np.random.default_rng(0).normal(size=FEATURES).astype(np.float32) / FEATURES**0.5

    def __len__(self) -> int:
        return self.samples

    def key(self, index: int) -> str:
        return f"store://samples/{index}"

    async def read(self, index: int) -> bytes:
        await asyncio.sleep(self.latency_s)
        features = np.random.default_rng(index).normal(size=FEATURES).astype(np.float32)
        return np.append(features, features @ self.weights).astype(np.float32).tobytes()


def decode(data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.frombuffer(bytearray(data), dtype=torch.float32)
    return numbers[:-1], numbers[-1:]


@dataclass
class Progress:
    """The answer to `/progress`."""

    epoch: int = 0
    batch: int = 0
    batches: int = 0
    loss: float | None = None
    done: bool = False


async def train(feeder: aiofeed.Feeder[list[torch.Tensor]], epochs: int, progress: Progress) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def step(features: torch.Tensor, targets: torch.Tensor) -> float:
        loss = nn.functional.mse_loss(model(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    progress.batches = len(feeder)
    async with feeder:
        for progress.epoch in range(1, epochs + 1):
            progress.batch = 0
            async for features, targets in feeder:
                progress.loss = await asyncio.to_thread(step, features, targets)
                progress.batch += 1
            print(f"epoch {progress.epoch}: loss {progress.loss:.4f}; {feeder.statistics()}", flush=True)
    progress.done = True


async def serve(progress: Progress, port: int) -> asyncio.Server:
    """Answer GET /progress on 127.0.0.1."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            known = request.startswith((b"GET /progress ", b"GET /progress?"))
            body = json.dumps(asdict(progress) if known else {"error": "try /progress"}).encode()
            status = b"200 OK" if known else b"404 Not Found"
            writer.write(b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n" % status)
            writer.write(b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
            await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client disconnected, or sent no HTTP: the training continues
        finally:
            writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", port)


async def request(port: int, path: str) -> str:
    """The body of the answer to GET ``path``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2].decode()


async def self_test(port: int, progress: Progress) -> None:
    """Send requests until the training is done."""
    answers = []
    while not progress.done:
        answers.append(await request(port, "/progress"))
        print("/progress:", answers[-1], flush=True)
        await asyncio.sleep(0.1)
    if len(set(answers)) < 3:
        raise SystemExit(f"the training gave {len(set(answers))} different answers, expected 3 or more")
    print(f"self-test: {len(answers)} answers while training")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0, the default, selects a free port, which is printed")
    parser.add_argument("--samples", type=int, default=20_000, help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--self-test", action="store_true", help="request the progress while training, then end")
    options = parser.parse_args()

    feeder: aiofeed.Feeder[list[torch.Tensor]] = aiofeed.Feeder(
        Store(options.samples), decode=decode, batch_size=64, shuffle=True, limits=aiofeed.Limits(read_concurrency=128)
    )
    progress = Progress()
    server = await serve(progress, options.port)
    port = server.sockets[0].getsockname()[1]
    print(f"listening on http://127.0.0.1:{port}/progress", flush=True)
    async with server, asyncio.TaskGroup() as group:
        group.create_task(train(feeder, options.epochs, progress))
        if options.self_test:
            group.create_task(self_test(port, progress))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None
