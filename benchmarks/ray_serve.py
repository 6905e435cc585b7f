"""What does a batch of a served feeder cost in a Ray cluster, against Unix sockets and shared memory?

``python -m benchmarks.ray_serve [--batches 300] [--rounds 3]`` starts a Ray cluster of two nodes on this machine, with
the server in this process and consumers in actors on the second node, that do nothing with their batches. Batches take
no time to make. The time per batch is that of an epoch, from the first batch to the last, at the slowest consumer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import aiofeed
from benchmarks.ray_cluster import Fill, Instant

SIZES = (100_000, 10_000_000)


class Trainer:
    """A consumer; its process also attaches to sockets, because both nodes are on this machine."""

    def attach(self, address: str) -> None:
        self.feed = aiofeed.attach(address)

    def epoch(self) -> float:
        """Seconds from the first batch to the last, per batch."""
        started = count = 0.0
        for batch in self.feed:
            del batch
            started = started or time.perf_counter()
            count += 1
        return (time.perf_counter() - started) / (count - 1)


def milliseconds_per_batch(address: str, trainers: list[Any], nbytes: int, options: argparse.Namespace) -> float:
    import ray

    feeder = aiofeed.Feeder(Instant(options.batches), decode=Fill(nbytes), batch_size=1)
    with feeder, aiofeed.serve(feeder, address, min_consumers=len(trainers), lag=options.lag):
        ray.get([each.attach.remote(address) for each in trainers])
        ray.get([each.epoch.remote() for each in trainers])
        rounds = [max(ray.get([each.epoch.remote() for each in trainers])) for _ in range(options.rounds)]
        return 1e3 * statistics.median(rounds)


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=300, help="per epoch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (%(default)s)")
    parser.add_argument("--lag", type=int, default=4, help="of serve (%(default)s)")
    options = parser.parse_args()
    store = {"object_store_memory": 500_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **store})
    cluster.add_node(num_cpus=1, resources={"trainer": 2}, **store)
    ray.init(address=cluster.address, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 2):
            for nbytes in SIZES:
                for address in (f"{folder}/feed.sock", "ray:benchmark"):
                    actors = ray.remote(Trainer).options(num_cpus=0, resources={"trainer": 1})
                    trainers = [actors.remote() for _ in range(count)]
                    found = milliseconds_per_batch(address, trainers, nbytes, options)
                    for each in trainers:
                        ray.kill(each)
                    kind = address.rpartition(":")[0] or "sockets"
                    load = os.getloadavg()[0]
                    print(f"{kind}: {count} consumers, {nbytes} bytes: {found:.2f} ms (load {load:.1f})", flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
