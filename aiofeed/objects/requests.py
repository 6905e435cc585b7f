"""Requests for objects: measured, sent again if they take unusually long, and what their errors mean."""

from __future__ import annotations

import asyncio
import errno
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

# The second requests ("hedges") per request, and how many may be sent in a row after a quiet time.
HEDGE_SHARE = 0.05
HEDGE_BURST = 10.0
# Latencies that must be known before a request counts as late, and those that are kept.
LEAST_KNOWN = 64
KEPT = 512
# A request is late after this many times the 95th percentile: half of the requests between 1 and 1.25 times end by
# themselves.
LATE_TIMES = 1.25
# A second request may be late, too: with 2 % late ones, one of 2,500 requests would otherwise take as long as before.
SENT_MOST = 3
# No second requests for so long after a request failed.
CALM_S = 1.0
# Shorter latencies are not worth a second request.
LATE_LEAST_S = 0.005
# A body is expected at this rate at least; a part of 8 MB then has some five minutes, for slow lines.
LEAST_BYTES_PER_S = 32 << 10
# A request whose body takes so much longer fails: obstore only limits the time between two bytes.
BODY_S = 20.0
# Open requests are checked at least this often, in seconds.
CHECK_S = 0.05
# The same as BODY_S for a body that is late, which is cancelled and requested again; and the multiple of the late time.
BODY_LEAST_S = 1.0
BODY_LATE_TIMES = 4

# How obstore begins a message; that of a web server reads "Generic HTTP error", whatever the fault.
_STORE = re.compile(r"Generic \w+ error: ")
_STATUS = re.compile(r"status code: (\d{3})")
_REASON = re.compile(r'(?:message|error): "([^"]+)"')
_OTHER_PART = re.compile(r"Requested \d+\.\.\d+, got ")
# The names of a fault of TLS: "InvalidCertificate", and its innermost reason, such as "UnknownIssuer".
_TLS = re.compile(r"kind: InvalidData,\s+error: (\w+)\((?:\s*\w+\()*\s*(\w+)")
# A redirect that cannot be followed, or leads to no URL.
_REDIRECT = re.compile(r"kind: (?:Redirect|Builder),\s+source: (\w+)")
# 408 and 429 ask for a later attempt; 409 is sent by S3 while a bucket changes.
_TRANSIENT = frozenset({408, 409, 425, 429})
_THROTTLED = re.compile(r"SlowDown|Throttl|rateLimitExceeded|RequestLimitExceeded|ServerBusy", re.I)
# The codes of S3, of GCS and of Azure; credentials of GCS and of Azure that have expired are also answered by 401.
_EXPIRED = re.compile(r"ExpiredToken|RequestExpired|TokenRefreshRequired|InvalidToken|token.{0,20}expired", re.I)


# A GetResult of obstore, its `meta`, which takes 2 us each time, and its body.
Answer: TypeAlias = tuple[Any, Mapping[str, Any], Any]


class LatencyWindow:
    """The latest latencies of requests of similar size, in seconds, and those of them that are open."""

    def __init__(self) -> None:
        self.latencies: deque[float] = deque(maxlen=KEPT)
        self.late_s: float = float("inf")
        # When the latest of the requests that were answered in time was sent.
        self.in_time_to: float = 0.0
        # In the order in which they were sent.
        self.open: dict[_Request, None] = {}
        self._unseen = LEAST_KNOWN

    @property
    def check_s(self) -> float:
        """How often open requests are checked, in seconds."""
        return min(self.late_s / 4, CHECK_S)

    def add(self, started: float) -> None:
        """Add a request that was answered now."""
        seconds = time.perf_counter() - started
        self.latencies.append(seconds)
        if seconds < self.late_s:
            self.in_time_to = max(self.in_time_to, started)
        self._unseen -= 1
        if not self._unseen:
            self._unseen = LEAST_KNOWN
            self.late_s = max(LATE_TIMES * percentile(self.latencies, 0.95), LATE_LEAST_S)


class RequestMonitor:
    """Sends requests on one loop at a time and keeps their figures."""

    def __init__(self) -> None:
        self.requests: int = 0
        self.retries: int = 0
        self.nbytes: int = 0
        self.hedges: int = 0
        # Whether any server has answered; a wrong host name or port never does.
        self.answered = False
        self.windows: dict[int, LatencyWindow] = {}
        self._allowed = 0.0
        self._calm_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def on_new_loop(self) -> RequestMonitor:
        """This monitor, for another loop than before, which was closed."""
        self._timer = None
        for window in self.windows.values():
            window.open.clear()
        return self

    async def send(self, begin: Callable[[], asyncio.Future[Any]], nbytes: int | None, most: int) -> Answer:
        """Return the first answer.

        Args:
            begin: Sends the request; returns a future of obstore's ``GetResult``.
            nbytes: The expected size of the body, if it is known.
            most: If the size is unknown and the body has more bytes, it is not received; it is then ``None``.
        """
        size_class = -1 if nbytes is None else nbytes.bit_length() // 2
        window = self.windows.get(size_class)
        if window is None:
            window = self.windows[size_class] = LatencyWindow()
        self._allowed = min(self._allowed + HEDGE_SHARE, HEDGE_BURST)
        loop = asyncio.get_running_loop()
        request = _Request(self, begin, loop.create_future(), most if nbytes is None else None)
        window.open[request] = None
        if self._timer is None:
            self._timer = loop.call_later(window.check_s, self._check, loop)
        try:
            request.send()
            answer, meta, body = await request.result
        finally:
            window.open.pop(request, None)
            request.cancel()
        window.add(request.started)
        self.nbytes += 0 if body is None else len(body)
        return answer, meta, body

    def failed(self) -> None:
        """Send no second requests for some time."""
        self._calm_at = time.perf_counter() + CALM_S

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send late requests again, and end those whose body takes too long."""
        now = time.perf_counter()
        for request in [each for window in self.windows.values() for each in window.open if now > each.limit]:
            request.give_up()
        for window in self.windows.values() if now > self._calm_at else ():
            for request in window.open:
                # If no later request was answered in time, the storage as a whole is slow, and more requests would make
                # that worse.
                if now - request.started < window.late_s or request.started > window.in_time_to:
                    break
                # A slow body is cancelled, so that its next request is no further load and needs no allowance.
                patience_s, is_slow = window.late_s, request.body_s is not None
                if request.body_s is not None:
                    patience_s = max(BODY_LATE_TIMES * patience_s, BODY_LEAST_S) + request.body_s
                overdue = now - request.started > patience_s * request.sent
                if not overdue or request.sent == SENT_MOST or request.result.done():
                    continue
                if is_slow:
                    request.cancel()
                    self.retries += 1
                    request.send()
                elif self._allowed >= 1.0:
                    self._allowed -= 1.0
                    self.hedges += 1
                    request.send()
        delay_s = min((window.check_s for window in self.windows.values() if window.open), default=None)
        self._timer = None if delay_s is None else loop.call_later(delay_s, self._check, loop)


@dataclass(eq=False, slots=True)
class _Request:
    """A request that may be sent several times; the first answer counts."""

    _monitor: RequestMonitor
    _begin: Callable[[], asyncio.Future[Any]]
    result: asyncio.Future[Any]
    _most: int | None
    _futures: list[asyncio.Future[Any]] = field(default_factory=list)
    # The most bytes of the body, and when they must have arrived, on the clock of `perf_counter`.
    nbytes: int = 0
    limit: float = float("inf")
    # Seconds that the body may need at the least rate; None if nothing was answered.
    body_s: float | None = None
    sent: int = 0
    started: float = field(default_factory=time.perf_counter)

    def send(self) -> None:
        self.sent += 1
        self._monitor.requests += 1
        self._follow(self._begin(), self._answered)

    def cancel(self) -> None:
        """Cancel what was sent."""
        for future in self._futures:
            future.cancel()
        self.body_s, self.limit = None, float("inf")

    def give_up(self) -> None:
        """Fail: the body did not arrive in time."""
        limit_s = BODY_S + self.nbytes / LEAST_BYTES_PER_S
        self._fail(TimeoutError(f"a part of {self.nbytes} bytes did not arrive within {limit_s:.0f} s"))

    def _follow(self, future: asyncio.Future[Any], then: Callable[[asyncio.Future[Any]], None]) -> None:
        self._futures.append(future)
        future.add_done_callback(then)

    def _answered(self, future: asyncio.Future[Any]) -> None:
        if (answer := self._take(future)) is None:
            return
        self._monitor.answered = True
        meta = answer.meta
        if self._most is not None and meta["size"] > self._most:
            self.result.set_result((answer, meta, None))
        else:
            self.nbytes = answer.range[1] - answer.range[0]
            self.body_s = self.nbytes / LEAST_BYTES_PER_S
            self.limit = time.perf_counter() + BODY_S + self.body_s
            self._follow(answer.bytes_async(), partial(self._received, answer, meta))

    def _fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    def _received(self, answer: Any, meta: Mapping[str, Any], future: asyncio.Future[Any]) -> None:
        if (body := self._take(future)) is not None:
            self.result.set_result((answer, meta, body))

    def _take(self, future: asyncio.Future[Any]) -> Any:
        """The result of a future; ``None`` if it failed, which fails the request if nothing else is under way."""
        self._futures.remove(future)
        if future.cancelled():
            return None
        error = future.exception()  # one that is not retrieved would be logged
        if self.result.done():
            return None
        if error is not None:
            if not self._futures:
                self._fail(error)
            return None
        return future.result()


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value that ``share`` of the values do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class ObjectInfo(NamedTuple):
    """The size of an object in bytes, its etag, and the seconds since 1970 when it changed."""

    size: int
    etag: str | None
    modified: float

    def is_version_of(self, other: ObjectInfo) -> bool:
        """Whether two answers are about the same version: by their etags, or by the time of change without these."""
        tags = (self.etag, other.etag) if self.etag and other.etag else (self.modified, other.modified)
        return self.size == other.size and tags[0] == tags[1]


class NoRangeError(OSError):
    """An object ends before a range, or the server refuses the request, perhaps because of its range."""


class RangesIgnoredError(OSError):
    """A server sends whole objects only."""


@dataclass(frozen=True)
class Fault:
    """A failed request.

    Args:
        error: The exception for the user, without credentials.
        transient: Whether the same request may succeed later.
        expired: Whether new credentials may help.
        answered: Whether a server has answered.
    """

    error: OSError
    transient: bool = False
    expired: bool = False
    answered: bool = True


_WAY = "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, or options={'skip_signature': True}"


def is_of_obstore(error: BaseException) -> bool:
    """Return whether an exception may be one of obstore: a panic of its Rust code is no ``Exception``."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def fault_of(error: BaseException, redact: Callable[[str], str], url: str) -> Fault:
    """Return the fault that an exception of obstore stands for."""
    text = str(error)
    first, kind = _STORE.sub("", text.partition("\n")[0]), type(error).__name__
    found = _STATUS.search(first)
    status = int(found[1]) if found else 0
    if not isinstance(error, Exception):
        first = f"obstore has failed at one of options=, or at an environment variable: {first}"
    if isinstance(error, FileNotFoundError):
        return Fault(FileNotFoundError(errno.ENOENT, "there is no such object", url))
    if kind == "PreconditionError":
        return Fault(changed(url))
    if "Received non-partial response" in first or "Range request not supported" in first:
        return Fault(RangesIgnoredError(f"the server ignores requests for a part of an object, as needed here: {url}"))
    expired = status == 401 or (status in (400, 403) and _EXPIRED.search(text) is not None)
    # A proxy may do both now and then. If no server has answered otherwise, this one always does.
    if "Content-Length Header missing" in first or _OTHER_PART.search(first):
        what = "does not send the length of the object" if "missing" in first else "sends another part than requested"
        return Fault(OSError(f"the server {what}: {url}"), True, answered=False)
    if status == 416 or "but object was only" in first:
        return Fault(NoRangeError(f"the object is shorter than the part of it that was requested: {url}"))
    throttled = _THROTTLED.search(text) is not None
    # Without keys in the environment, credentials are requested from the address of a cloud's machines.
    way = _WAY if url.startswith("s3://") and (status in (401, 403) or "169.254.169.254" in text) else ""
    if (status in (401, 403) and not throttled) or expired:
        hint = "the credentials are not accepted" if status == 401 else "access is denied"
        hint = "the credentials have expired" if expired and status != 401 else hint
        return Fault(PermissionError(errno.EACCES, redact(f"{hint}: {_short(first)}") + way, url), expired=expired)
    network = isinstance(error, TimeoutError | ConnectionError) or "HTTP error" in first or "error sending" in first
    reason, tls, redirect = _REASON.search(text), _TLS.search(text), _REDIRECT.search(text)
    if network and tls is not None:
        first = f"{first} ({tls[1]}: {tls[2]})"
    elif network and redirect is not None:
        first = f"{first} ({redirect[1]})"
    elif network and reason is not None:
        first = f"{first} ({'host name: ' if 'dns error' in text else ''}{reason[1]})"
    message = redact(_short(first)) + way
    # No other attempt changes a redirect or a certificate.
    lasting = redirect is not None or (tls is not None and tls[1] == "InvalidCertificate")
    transient = (network and not lasting) or throttled or (status >= 500 and status != 501) or status in _TRANSIENT
    refused = status in (400, 405, 501) or "CONTENT_RANGE" in first
    named = (NoRangeError if refused else OSError)(f"{message}: {url}")
    return Fault(named, transient=transient, answered=bool(status) or "Body" in text)


def changed(url: str) -> OSError:
    """Return the error of an object whose etag is not the expected one."""
    return OSError(f"the object has changed since its index, or an earlier part of it, was read: {url}")


def other_size(url: str, size: int, listed: int | None) -> OSError:
    """Return the error of an object whose size is not the one in the listing."""
    return OSError(
        f"the server sends {size} bytes, and the listing has {listed}: the object was replaced, and refresh=True lists "
        f"again, or a proxy sent something else: {url}"
    )


def too_short(url: str, start: int, end: int) -> OSError:
    """Return the error of an object that ends within a range."""
    return OSError(f"the object ends before byte {end}; bytes {start} to {end} were requested: {url}")


def _short(text: str) -> str:
    """Return the part of a message that does not repeat the URL."""
    parts = re.split(r" in [\d.]+(?:ns|µs|ms|s) - ", text, maxsplit=1)
    return parts[-1][:500]
