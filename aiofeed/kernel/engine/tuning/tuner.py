"""The two tuners of one feeder, and when a GIL limit is reported."""

from __future__ import annotations

from aiofeed.kernel.engine.tuning.gil import GilLimit
from aiofeed.kernel.engine.tuning.reads import READS_MOST, ReadTuner
from aiofeed.kernel.engine.tuning.threads import ThreadTuner

# A worker process costs some 20 us per sample beside decoding: less than twice that under the GIL gains nothing.
REPORT_HELD_S = 40e-6
# Less decoding than this is not worth starting processes for, and figures of a few hundredths of a second are chance.
REPORT_AFTER_S = 2.0


class Tuner:
    """Chooses threads and reads.

    Args:
        decode_threads, threads_given: as of ``ThreadTuner``.
        read_concurrency, reads_given, reads_most: as of ``ReadTuner``.

    Attributes:
        max_running: threads that decode now; fewer than chosen if samples are tiny.
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
        self.decoding: ThreadTuner = ThreadTuner(decode_threads, given=threads_given)
        self.reading: ReadTuner = ReadTuner(read_concurrency, given=reads_given, most=reads_most)
        self.max_running = decode_threads
        self._reported = False

    def gil_report(self) -> GilLimit | None:
        """Return the GIL limit, once, if processes would gain something."""
        limit = self.decoding.gil
        if self._reported or limit is None or limit.held_s < REPORT_HELD_S or self.decoding.worked_s < REPORT_AFTER_S:
            return None
        self._reported = True
        return limit
