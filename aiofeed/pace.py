"""How long decoding takes, and how many samples an executor job should have, therefore."""

from __future__ import annotations

# Work per executor job. A chunk costs the loop a task, two hops through executors and three wake-ups, which 25 ms of
# decoding makes small; a batch still splits into a piece for each thread.
CHUNK_S = 0.025
FIRST_CHUNK = 16


class Pace:
    """Seconds of decoding per sample, followed by a moving average; from it the size of a chunk."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def observe(self, seconds: float, samples: int) -> None:
        """Take note of what some samples took together."""
        per_sample = seconds / max(samples, 1)
        self.seconds += (per_sample - self.seconds) * (0.2 if self.seconds else 1.0)

    def chunk_size(self, samples: int, threads: int) -> int:
        """How many of a batch's ``samples`` make a job, for so many threads."""
        even = -(-samples // threads)
        if self.seconds == 0.0:
            return max(1, min(FIRST_CHUNK, even))
        wanted = max(1, int(CHUNK_S / self.seconds))
        if wanted >= samples:
            return samples
        # As many pieces as threads, or a multiple: an odd piece would leave a thread idle at the end of an epoch.
        pieces = max(threads, -(-samples // wanted) // threads * threads)
        return -(-samples // pieces)
