"""How long decoding takes, and how many samples an executor job should have, therefore."""

from __future__ import annotations

# Work per executor job. A chunk costs the loop a task, two hops through executors and three wake-ups, which 25 ms of
# decoding makes small; a batch still splits into a piece for each thread.
CHUNK_S = 0.025
FIRST_CHUNK = 16
# Encoded bytes of a job, where that is more than one sample: what is read is decoded while it is still in a cache, and
# the memory that it leaves serves the next one.
CHUNK_BYTES = 16 << 20
# Less than this part of its time on the processor, and a sample waits for something of its own: storage, a network.
AT_WORK = 0.1


class Pace:
    """Seconds of decoding and encoded bytes per sample, followed by moving averages; from them the size of a chunk."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._bytes = 0.0

    def weigh(self, nbytes: int, samples: int) -> None:
        """Take note of how large some samples were together."""
        per_sample = nbytes / max(samples, 1)
        self._bytes += (per_sample - self._bytes) * (0.2 if self._bytes else 1.0)

    def observe(self, seconds: float, samples: int, cpu_s: float = 0.0) -> None:
        """Take note of what some samples took together, ``cpu_s`` of it on the processor.

        Where that is a good part it counts alone. The rest is waiting for the GIL or for a core, which says nothing of
        the samples: taken for work, it makes chunks small, which makes threads wait for one another more.
        """
        if cpu_s > seconds * AT_WORK:
            seconds = cpu_s
        per_sample = seconds / max(samples, 1)
        self.seconds += (per_sample - self.seconds) * (0.2 if self.seconds else 1.0)

    def chunk_size(self, samples: int, threads: int) -> int:
        """How many of a batch's ``samples`` make a job, for so many threads."""
        even = -(-samples // threads)
        if self.seconds == 0.0:
            return max(1, min(FIRST_CHUNK, even))
        wanted = max(1, int(min(CHUNK_S / self.seconds, CHUNK_BYTES / max(self._bytes, 1.0))))
        if wanted >= samples:
            return samples
        # As many pieces as threads, or a multiple: an odd piece would leave a thread idle at the end of an epoch.
        pieces = max(threads, -(-samples // wanted) // threads * threads)
        return -(-samples // pieces)
