"""What an error of obstore means: whether to send the request again, and the exception for the user."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

# How obstore begins a message; that of a web server reads "Generic HTTP error", whatever the fault.
_STORE = re.compile(r"Generic \w+ error: ")
_STATUS = re.compile(r"status code: (\d{3})")
_REASON = re.compile(r'(?:message|error): "([^"]+)"')
# The names of a fault of TLS: "InvalidCertificate", and its innermost reason, such as "UnknownIssuer".
_TLS = re.compile(r"kind: InvalidData,\s+error: (\w+)\((?:\s*\w+\()*\s*(\w+)")
# A redirect that cannot be followed, or leads to no URL.
_REDIRECT = re.compile(r"kind: (?:Redirect|Builder),\s+source: (\w+)")
# 408 and 429 ask for a later attempt; 409 is sent by S3 while a bucket changes.
_TRANSIENT = frozenset({408, 409, 425, 429})
_THROTTLED = re.compile(r"SlowDown|Throttl|rateLimitExceeded|RequestLimitExceeded|ServerBusy", re.I)
# The codes of S3, of GCS and of Azure; credentials of GCS and of Azure that have expired are also answered by 401.
_EXPIRED = re.compile(r"ExpiredToken|RequestExpired|TokenRefreshRequired|InvalidToken|token.{0,20}expired", re.I)


class ObjectInfo(NamedTuple):
    """The size of an object in bytes, its etag, and the seconds since 1970 when it changed."""

    size: int
    etag: str | None
    modified: float

    def is_version_of(self, other: ObjectInfo) -> bool:
        """Whether two answers are about the same version: by their etags, or by the time of change without these."""
        tags = (self.etag, other.etag) if self.etag and other.etag else (self.modified, other.modified)
        return self.size == other.size and tags[0] == tags[1]


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


def fault_of(error: Exception, redact: Callable[[str], str], url: str) -> Fault:
    """The fault that an exception of obstore stands for."""
    text = str(error)
    first, kind = _STORE.sub("", text.partition("\n")[0]), type(error).__name__
    found = _STATUS.search(first)
    status = int(found[1]) if found else 0
    if isinstance(error, FileNotFoundError):
        return Fault(FileNotFoundError(errno.ENOENT, "there is no such object", url))
    if kind == "PreconditionError":
        return Fault(changed(url))
    if "Received non-partial response" in first or "Range request not supported" in first:
        return Fault(RangesIgnoredError(f"the server ignores requests for a part of an object, as needed here: {url}"))
    expired = status == 401 or (status in (400, 403) and _EXPIRED.search(text) is not None)
    if status == 416:
        return Fault(OSError(f"the object is shorter than the part of it that was requested: {url}"))
    throttled = _THROTTLED.search(text) is not None
    if (status in (401, 403) and not throttled) or expired:
        hint = "the credentials are not accepted" if status == 401 else "access is denied"
        hint = "the credentials have expired" if expired and status != 401 else hint
        return Fault(PermissionError(errno.EACCES, redact(f"{hint}: {_short(first)}"), url), expired=expired)
    network = isinstance(error, TimeoutError | ConnectionError) or "HTTP error" in first or "error sending" in first
    reason, tls, redirect = _REASON.search(text), _TLS.search(text), _REDIRECT.search(text)
    if network and tls is not None:
        first = f"{first} ({tls[1]}: {tls[2]})"
    elif network and redirect is not None:
        first = f"{first} ({redirect[1]})"
    elif network and reason is not None:
        first = f"{first} ({'host name: ' if 'dns error' in text else ''}{reason[1]})"
    message = redact(_short(first))
    # No other attempt changes a redirect or a certificate.
    lasting = redirect is not None or (tls is not None and tls[1] == "InvalidCertificate")
    transient = (network and not lasting) or throttled or status >= 500 or status in _TRANSIENT
    return Fault(OSError(f"{message}: {url}"), transient=transient, answered=bool(status) or "Body" in text)


def changed(url: str) -> OSError:
    """The error of an object whose etag is not the expected one."""
    return OSError(f"the object has changed since its index, or an earlier part of it, was read: {url}")


def other_size(url: str, size: int, listed: int | None) -> OSError:
    """The error of an object whose size is not the one in the listing."""
    return OSError(
        f"the server sends {size} bytes, and the listing has {listed}: the object was replaced, and refresh=True lists "
        f"again, or a proxy sent something else: {url}"
    )


def too_short(url: str, start: int, end: int) -> OSError:
    """The error of an object that ends within a range."""
    return OSError(f"the object ends before byte {end}; bytes {start} to {end} were requested: {url}")


def _short(text: str) -> str:
    """The part of a message that does not repeat the URL."""
    parts = re.split(r" in [\d.]+(?:ns|µs|ms|s) - ", text, maxsplit=1)
    return parts[-1][:500]
