"""No worker process is left after a test."""

from tests.support.waiting import no_worker_left_running  # noqa: F401
