"""A discrete-event model of ``engine="ray"``: which rate do k nodes and t trainers reach, and what limits it?

``python -m benchmarks.ray_model [--picture docs/ray-model.svg]``. Each trainer has a feeder, an event loop and a
network interface of its own, and an equal share of the actors. An actor decodes its batches one after the other; a
finished batch passes through the interface of its node, that of the trainer, and the trainer's loop, each of which
serves one batch at a time. Batches are delivered in order, from a window as large as that of the feeder. Actors die
at random; their batches are decoded again by others, and a new actor starts after a while.

First, the model of the benchmark ``ray_cluster``, to compare with its measurement. Then photographs: 1 to 256 nodes
and 1 to 64 trainers.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Model:
    """One trainer and its actors.

    Args:
        actors, actors_per_node: Of this trainer.
        batch_s: Time in which an actor decodes a batch.
        batch_mb: Size of a batch.
        read_s: Time to read the first batch; later reads overlap with decoding.
        node_mb_s, trainer_mb_s: Bandwidth of a node, for this trainer's actors, and of the trainer.
        loop_s, loop_s_per_mb: Time that the trainer's loop takes for a batch, measured by ``ray_cluster``.
        mtbf_s: Mean time to the death of an actor; 0 for never.
        restart_s: Time until a new actor is ready.
    """

    actors: int
    batch_s: float
    batch_mb: float
    actors_per_node: int = 8
    read_s: float = 0.02
    node_mb_s: float = 3000.0
    trainer_mb_s: float = 3000.0
    loop_s: float = 0.0
    loop_s_per_mb: float = 0.0
    mtbf_s: float = 0.0
    restart_s: float = 10.0


class Line:
    """A resource that serves one batch at a time, first come, first served."""

    def __init__(self) -> None:
        self.free_at = self.busy_s = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """The time at which a batch that comes now has been served."""
        self.free_at = max(now, self.free_at) + seconds
        self.busy_s += seconds
        return self.free_at


def simulate(model: Model, seed: int = 0) -> tuple[float, str]:
    """Batches per second, and the resource that is busy the most."""
    rng = random.Random(seed)
    batches = 40 * model.actors + 200
    window = 3 + 2 * model.actors + 1
    nodes = [Line() for _ in range(-(-model.actors // model.actors_per_node))]
    interface, loop = Line(), Line()
    actors = [Line() for _ in range(model.actors)]
    alive = [True] * model.actors
    assigned: list[deque[int]] = [deque() for _ in actors]
    running: list[int | None] = [None] * model.actors  # the event that ends the batch in work
    waiting = deque(range(batches))
    delivered, done = 0, [False] * batches
    events: list[tuple[float, int, str, int]] = []
    numbers = itertools.count()
    times: list[float] = []

    def at(when: float, what: str, which: int) -> int:
        number = next(numbers)
        heapq.heappush(events, (when, number, what, which))
        return number

    def begin(actor: int, now: float) -> None:
        if running[actor] is None and assigned[actor] and alive[actor]:
            first = model.read_s if not actors[actor].busy_s else 0.0
            running[actor] = at(actors[actor].serve(now, model.batch_s + first), "decoded", actor)

    def plan(now: float) -> None:
        while waiting and waiting[0] < delivered + window:
            actor = min((n for n in range(model.actors) if alive[n]), key=lambda n: len(assigned[n]), default=None)
            if actor is None:
                return
            assigned[actor].append(waiting.popleft())
            begin(actor, now)

    if model.mtbf_s:
        for actor in range(model.actors):
            at(rng.expovariate(1 / model.mtbf_s), "dies", actor)
    plan(0.0)
    while delivered < batches:
        now, number, what, which = heapq.heappop(events)
        if what == "decoded" and running[which] == number:
            batch = assigned[which].popleft()
            running[which] = None
            node = nodes[which // model.actors_per_node]
            sent = node.serve(now, model.batch_mb / model.node_mb_s)
            at(sent, "sent", batch)
            begin(which, now)
        elif what == "sent":
            at(interface.serve(now, model.batch_mb / model.trainer_mb_s), "arrived", which)
        elif what == "arrived":
            at(loop.serve(now, model.loop_s + model.loop_s_per_mb * model.batch_mb), "finished", which)
        elif what == "finished":
            done[which] = True
            while delivered < batches and done[delivered]:
                delivered += 1
                times.append(now)
        elif what == "dies":
            alive[which], running[which] = False, None
            waiting.extendleft(sorted(assigned[which], reverse=True))
            assigned[which].clear()
            actors[which].free_at = now
            at(now + model.restart_s, "starts", which)
        elif what == "starts":
            alive[which] = True
            at(now + rng.expovariate(1 / model.mtbf_s), "dies", which)
        plan(now)
    end = times[-1]
    shares = {
        "decoding": sum(each.busy_s for each in actors) / len(actors) / end,
        "a node's network": max(each.busy_s for each in nodes) / end,
        "the trainer's network": interface.busy_s / end,
        "the trainer's loop": loop.busy_s / end,
    }
    half = len(times) // 4
    rate = (len(times) - 2 * half - 1) / (times[-half - 1] - times[half])
    return rate, max(shares, key=lambda name: shares[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop-ms", type=float, default=4.4, help="per batch, as measured (%(default)s)")
    parser.add_argument("--loop-ms-per-mb", type=float, default=0.31, help="as measured (%(default)s)")
    parser.add_argument("--picture", type=Path, help="write the rates as a picture")
    options = parser.parse_args()
    loop = {"loop_s": options.loop_ms / 1e3, "loop_s_per_mb": options.loop_ms_per_mb / 1e3}
    for actors in (1, 2, 4, 8):
        rate, _ = simulate(Model(actors, batch_s=0.320, batch_mb=0.001, **loop))
        print(f"ray_cluster, {actors} actors: {32 * rate:.0f} samples/s")
    # 64 photographs: 5 ms each on one core, 2 cores per actor, 8 actors per node; uint8 [64, 3, 224, 224].
    photographs = Model(8, batch_s=64 * 0.005 / 2, batch_mb=9.6, mtbf_s=6 * 3600, **loop)
    rates: dict[int, dict[int, float]] = {}
    for trainers in (1, 4, 16, 64):
        for nodes in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            if nodes * 8 >= trainers:
                model = replace(photographs, actors=nodes * 8 // trainers)
                rate, limit = simulate(model)
                rates.setdefault(trainers, {})[nodes] = 64 * rate * trainers
                print(f"{nodes} nodes, {trainers} trainers: {64 * rate * trainers:.0f} images/s, limited by {limit}")
    if options.picture:
        draw(rates, options.picture)


def draw(rates: dict[int, dict[int, float]], path: Path) -> None:
    """Write the picture."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for trainers, found in rates.items():
        label = f"{trainers} trainer{'s' if trainers > 1 else ''}"
        axes.loglog(list(found), list(found.values()), marker="o", base=2, label=label)
    axes.set(xlabel="nodes with 16 cores", ylabel="images/s, all trainers", title='engine="ray", model')
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
