"""Repositories of the Hugging Face Hub: ``huggingface_hub`` lists them and signs URLs, from which obstore reads.

A revision is resolved to its commit when a reader is made, so that all readers of a source, its copies in other
processes and its later epochs read the same files.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from aiofeed.kernel.core.formatting import redacted
from aiofeed.objects.clients import StoreClient
from aiofeed.objects.requests import ObjectInfo
from aiofeed.objects.urls import HUB

ResultT = TypeVar("ResultT")

log: logging.Logger = logging.getLogger("aiofeed.sources")

COMMIT = re.compile(r"[0-9a-f]{40}")
# How long a request is sent again after other answers than 429, with growing pauses; the second, if the Hub has never
# answered.
RETRY_S, FIRST_RETRY_S, PAUSE_S = 60.0, 3.0, 0.25
# The most seconds that an answer 429 may ask to wait: the Hub counts requests in windows of 5 minutes.
WAIT_MOST_S = 600.0
_INSTALL = 'hf:// URLs are read by huggingface_hub and obstore: pip install "aiofeed[hub]"'
# The seconds until the limit of requests is reset, in the header RateLimit.
_RESET = re.compile(r"\bt=(\d+)")


class Located(NamedTuple):
    """The URL from which a file is read, signed or the Hub's own, and what the Hub says about the file."""

    url: str
    info: ObjectInfo


def at_commit(root: str) -> str:
    """Return the root of a repository with the commit of its revision, such as ``hf://datasets/owner/name@<commit>``.

    Raises:
        ImportError: huggingface_hub is not installed.
        OSError: The Hub cannot be asked, or there is no such repository or revision.
    """
    repository, _, revision = root.partition("@")
    if COMMIT.fullmatch(revision):
        return root
    client = HubClient(root, {})
    while isinstance(found := client.ask(client.commit, root), float):
        time.sleep(found)
    return f"{repository}@{found}"


class HubClient(StoreClient):
    """The stores of the files of a repository at one commit: one for each signed URL. Thread-safe.

    The token is looked up for each request, as ``huggingface_hub`` does it, and kept nowhere else.
    """

    def __init__(self, root: str, options: Mapping[str, Any], store: Any = None) -> None:
        if store is not None:
            raise ValueError(f"{root}: store= is an obstore store, and the Hub is read through huggingface_hub")
        super().__init__(root, options)
        match = HUB.fullmatch(root)
        assert match is not None
        self._type, self._name, self._revision = (match[1] or "models")[:-1], match[2], unquote(match[3] or "") or None
        self._located: dict[str, Located] = {}
        self._answered, self._failing_since, self._pause_s, self._paused_until = False, 0.0, PAUSE_S, 0.0
        try:
            self._api()
        except ImportError:
            raise ImportError(f"{root}: {_INSTALL}") from None

    # A URL that has expired is signed again, whatever the error that its server sends.
    is_outdated = True

    def endpoint(self) -> str:
        """Return the server of the Hub."""
        url: str = os.environ.get("HF_ENDPOINT") or _hub().constants.ENDPOINT
        return url.rstrip("/")

    def redact(self, text: str, query: str = "") -> str:
        """Return a text without the token and without signatures."""
        return redacted(text, filter(None, [_hub().get_token()]))

    def renew(self, version: int, query: str = "") -> None:
        """Forget a signed URL."""
        with self._lock:
            self._located = {key: each for key, each in self._located.items() if each.url != query}

    async def locate(self, key: str) -> Located:
        """Return where a file is: as known, or asked now.

        Raises:
            OSError: There is no such file, or the Hub cannot be asked.
        """
        found = self._located.get(key)
        if found is None:
            found = await self._answer(lambda: self._metadata(key), key)
            with self._lock:
                self._located[key] = found
        return found

    async def list(self, prefix: str, *, recursive: bool = True) -> list[tuple[str, ObjectInfo]]:
        """Return the files of a folder, and of those in it if ``recursive``, with their information."""

        def entries() -> list[tuple[str, ObjectInfo]]:
            options = {"revision": self._revision, "repo_type": self._type, "recursive": recursive}
            found = self._api().list_repo_tree(self._name, prefix.strip("/") or None, **options)
            return [(each.path, _info(each)) for each in found if hasattr(each, "blob_id")]

        return await self._answer(entries, prefix)

    async def _answer(self, function: Callable[[], ResultT], key: str) -> ResultT:
        while isinstance(found := await asyncio.to_thread(self.ask, function, f"{self.root}/{key}"), float):  # noqa: ASYNC110
            await asyncio.sleep(found)
        return found  # type: ignore[no-any-return]

    def commit(self) -> str:
        """Return the commit of the revision."""
        info = self._api().repo_info(self._name, revision=self._revision, repo_type=self._type, expand=["sha"])
        return str(info.sha)

    def _metadata(self, key: str) -> Located:
        hub, options = _hub(), {"endpoint": self.endpoint(), "revision": self._revision, "repo_type": self._type}
        found = hub.get_hf_file_metadata(hub.hf_hub_url(self._name, key, **options), endpoint=self.endpoint())
        return Located(found.location, ObjectInfo(found.size, found.etag, 0.0))

    def ask(self, function: Callable[[], Any], url: str) -> Any:
        """The result of a function of huggingface_hub; the seconds after which to call it again, as a ``float``."""
        now = time.monotonic()
        if now < self._paused_until:
            return self._paused_until - now
        try:
            result = function()
            self._answered, self._failing_since = True, 0.0
            return result
        except Exception as error:  # noqa: BLE001 - of huggingface_hub and its HTTP client; raised below
            response, kind, module = getattr(error, "response", None), type(error).__name__, type(error).__module__
            text = self.redact(str(error).strip().partition("\n")[0])
        # Outside of the block above, so that the error has no context, in which the request has the token.
        status, headers = (0, {}) if response is None else (response.status_code, response.headers)
        if kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
            raise FileNotFoundError(errno.ENOENT, "there is no such object", url)
        if kind in ("RepositoryNotFoundError", "RevisionNotFoundError"):
            hint = "there is no such repository or revision, or the token has no access to it; see HF_TOKEN"
            raise FileNotFoundError(errno.ENOENT, hint, url)
        if status in (401, 403):
            raise PermissionError(errno.EACCES, f"access is denied: {text}", url)
        if kind == "HFValidationError":
            raise ValueError(f"{url}: {text}")
        if status == 429 and (wait_s := _wait_s(headers)) is not None and wait_s <= WAIT_MOST_S:
            log.warning("the Hub asks to wait %.0f s before the next request", wait_s)
            self._paused_until = time.monotonic() + wait_s
            return wait_s
        transient = status == 429 or status >= 500 or (not status and module.startswith(("httpx", "requests")))
        if not self._failing_since:
            self._failing_since, self._pause_s = now, PAUSE_S
        self._answered |= status > 0
        if not transient or now - self._failing_since >= (RETRY_S if self._answered else FIRST_RETRY_S):
            raise OSError(f"{text or kind}: {url}")
        self._pause_s *= 2
        return self._pause_s

    def _api(self) -> Any:
        return _hub().HfApi(endpoint=self.endpoint())

    def _new_store(self, query: str) -> Any:
        """Return a store of one file, whose key is empty. The token is sent to the Hub only."""
        client = dict(self.options.get("client_options", {}))
        if urlsplit(query)[:2] == urlsplit(self.endpoint())[:2]:
            sent = _hub().utils.build_hf_headers()
            headers = {name: sent[name] for name in ("authorization",) if name in sent}
            client["default_headers"] = {**client.get("default_headers", {}), **headers}
        return StoreClient(query, {**self.options, "client_options": client}).store()[0]


def _info(entry: Any) -> ObjectInfo:
    return ObjectInfo(entry.size, entry.blob_id if entry.lfs is None else entry.lfs.sha256, 0.0)


def _wait_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that an answer asks to wait; ``None`` if it does not say."""
    given = headers.get("retry-after", "")
    reset = _RESET.search(headers.get("ratelimit", ""))
    if given.isdecimal() or reset is not None:
        return float(reset[1] if reset is not None and not given.isdecimal() else given)
    try:
        return max(parsedate_to_datetime(given).timestamp() - time.time(), PAUSE_S)
    except ValueError:
        return None


def _hub() -> Any:
    return importlib.import_module("huggingface_hub")
