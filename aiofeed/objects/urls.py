"""URLs of objects: their roots, keys and secrets."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from urllib.request import url2pathname

from aiofeed.kernel.core.formatting import redacted
from aiofeed.kernel.sources.file_io import URL

SCHEMES = ("s3", "gs", "az", "hf", "http", "https", "file")
# A repository: its kind, its name, and its revision, of which those of the Hub itself have slashes.
HUB = re.compile(
    r"hf://(?:(datasets|models|spaces)/|(?!(?:datasets|models|spaces)/))([^/@]+/[^/@]+)"
    r"(?:@(refs/(?:convert|pr)/[^/]+|[^/@]+))?"
)
# Names of options and of environment variables whose values are secret.
_SECRET = re.compile(r"secret|password|token|key|sas|signature|credential|authorization|bearer|headers", re.IGNORECASE)
# The first letters of the environment variables that stores read.
ENVIRONMENT: tuple[str, ...] = ("AWS_", "AZURE_", "GOOGLE_", "GCP_", "HF_")
# A query with a signature, and its parameters that change when it is signed again: of S3, GCS, CloudFront and Azure.
_SIGNED = re.compile(r"(^|&)(sig|signature|x-\w+-signature)=", re.IGNORECASE)
_SIGNING = re.compile(
    r"x-(amz|goog)-.*|(aws|oss)accesskeyid|googleaccessid|expires|signature|policy|key-pair-id"
    r"|sig|s[veprti]|sip|spr|skoid|sktid|sk[tesv]",
    re.IGNORECASE,
)
# Between a key and its query. No key of a store has this character.
QUERY = "\0"
# Shorter values, such as "1" or "true", are no secrets, and would blank ordinary text.
_SECRET_LEAST = 6


def scheme_of(path: object) -> str | None:
    """Return the scheme of a URL in lower case; ``None`` for a path of the file system.

    Raises:
        ValueError: No store reads this scheme.
    """
    if not isinstance(path, str) or (match := URL.match(path)) is None:
        return None
    scheme = match[1].lower()
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"{redacted(path)!r}: the scheme must be one of {known}")
    return scheme


def is_remote(path: object) -> bool:
    """Return whether a path is a URL, and not one of a local file."""
    return scheme_of(path) not in (None, "file")


def path_of_url(url: str) -> str | None:
    """Return the path of a ``file://`` URL; ``None`` for one that a store reads."""
    return None if is_remote(url) else split_url(url)[1]


def split_url(url: str) -> tuple[str, str]:
    """Return the root and the key of a URL: ``("s3://bucket", "train/a.jpg")``; of a local file ``("", path)``.

    A query of an http URL is a part of its root here; ``with_query`` makes it a part of the key.

    Raises:
        ValueError: The URL has no bucket or host, or credentials that its store does not read.
    """
    scheme = scheme_of(url)
    if scheme is None:
        return "", url
    if scheme == "file":
        return "", _local_path(url)
    if scheme == "hf":
        found = HUB.match(url)
        if found is None or url[found.end() : found.end() + 1] not in ("", "/"):
            raise ValueError(f"{url!r} names no repository: write hf://datasets/owner/name@revision/path")
        return found[0], url[found.end() + 1 :]
    if scheme in ("http", "https"):
        parts = urlsplit(url)
        root, key = f"{scheme}://{parts.netloc}", unquote(parts.path[1:])
        host = parts.hostname
        root += f"?{parts.query}" if parts.query else ""
    else:
        # The keys of these stores are plain text: "%" and "?" are parts of a key.
        host, _, key = url.partition("://")[2].partition("/")
        root = f"{scheme}://{host}"
        if "@" in host or redacted(host) != host:
            raise ValueError(f"{redacted(url)!r}: credentials are not a part of such a URL; pass them in options=")
    if not host:
        raise ValueError(f"{redacted(url)!r} names no {'host' if scheme.startswith('http') else 'bucket'}")
    return root, key


def with_query(root: str, key: str) -> tuple[str, str]:
    """Return a root without its query, and the key with it."""
    root, _, query = root.partition("?")
    return root, f"{key}{QUERY}{query}" if query else key


def without_signature(key: str) -> str:
    """Return a key with a hash in place of its query, or without it if it has only the parameters of a signature."""
    key, mark, query = key.partition(QUERY)
    if not mark:
        return key
    if _SIGNED.search(query):
        query = "&".join(pair for pair in query.split("&") if not _SIGNING.fullmatch(pair.partition("=")[0]))
    return f"{key}?{hashlib.sha256(query.encode()).hexdigest()[:16]}" if query else key


def join_url(root: str, key: str) -> str:
    """The URL of a key, without credentials; a hash in place of a query distinguishes objects that differ in it."""
    return redacted(f"{root.partition('?')[0]}/{without_signature(key)}") if root else key


def _local_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"{url!r}: a file:// URL has three slashes and an absolute path, as in file:///data/train")
    return url2pathname(parts.path)


def secrets_of(root: str, options: Mapping[str, Any]) -> list[str]:
    """Return the secret values in a root, in options and in the environment, the longest first."""
    parts = urlsplit(root)
    found = {part for part in (parts.username, parts.password) if part is not None}
    found.update(value for _, value in parse_qsl(parts.query))
    for name, value in os.environ.items():
        if name.startswith(ENVIRONMENT) and _SECRET.search(name):
            found.add(value)
    waiting: list[tuple[str, Any, bool]] = [(name, value, False) for name, value in options.items()]
    while waiting:
        name, value, inside = waiting.pop()
        secret = inside or _SECRET.search(name) is not None
        if isinstance(value, Mapping):
            waiting += [(str(inner), entry, secret) for inner, entry in value.items()]
        elif secret and isinstance(value, str | bytes):
            found.add(value if isinstance(value, str) else value.decode("latin-1"))
    return sorted((value for value in found if len(value) >= _SECRET_LEAST), key=len, reverse=True)
