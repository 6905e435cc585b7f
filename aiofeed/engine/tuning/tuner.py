"""How many samples are read at a time and how many threads decode, found out as they do, for one feeder."""

from __future__ import annotations

from aiofeed.engine.tuning.gil import GilLimit
from aiofeed.engine.tuning.reads import READS_MOST, ReadTuner
from aiofeed.engine.tuning.threads import ThreadTuner

# A sample costs an engine process some 20 us beside its decoding: of less than twice that under the GIL nothing is won.
WORTH_TELLING_S = 40e-6
# Nobody starts processes for less decoding than this, and figures of a few hundredths of a second may be chance.
TELL_AFTER_S = 2.0


class Tuner:
    """Both, for one feeder.

    Args:
        decode_threads, threads_given, read_concurrency, reads_given, reads_most: as of ``ThreadTuner`` and
            ``ReadTuner``.
    """

    def __init__(
        self,
        *,
        decode_threads: int,
        threads_given: bool,
        read_concurrency: int,
        reads_given: bool,
        reads_most: int = READS_MOST,
    ) -> None:
        self.decoding = ThreadTuner(decode_threads, given=threads_given)
        self.reading = ReadTuner(read_concurrency, given=reads_given, most=reads_most)
        self.told = False
        # Threads that may decode now, as whoever goes by this says: the samples may be such that it takes fewer.
        self.max_running = decode_threads

    def news(self) -> GilLimit | None:
        """The GIL's limit, once, where there is a way out that would gain something."""
        limit = self.decoding.gil
        if self.told or limit is None or limit.held_s < WORTH_TELLING_S or self.decoding.worked_s < TELL_AFTER_S:
            return None
        self.told = True
        return limit
