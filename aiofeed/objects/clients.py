"""The obstore client of a root: made at first use, made again when credentials expire, never used in a forked child."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from aiofeed.kernel.core.errors import FeedError
from aiofeed.kernel.runtime import threads
from aiofeed.objects.requests import is_of_obstore
from aiofeed.objects.urls import ENVIRONMENT, redacted, secrets_of

# A server that sends nothing for so long is asked again. obstore's own limit is 30 s for a whole answer, which a slow
# line may need for one part of a large object.
TIMEOUTS = {"read_timeout": "20s", "timeout": "300s"}
# Stores that are kept for the queries of a host. obstore has one store for each query: it takes 5 ms of CPU and 150 KB,
# and leaves a connection open.
QUERIES = 64
# obstore's threads take the GIL once more after a request has ended.
_SETTLE_S = 0.02

_INSTALL = 'objects in cloud storage and on web servers are read by obstore: pip install "aiofeed[objects]"'


class StoreClient:
    """The obstore store of a root, or its stores for URLs with queries of their own. Thread-safe.

    Retries are made by ``ObjectReader``, which counts them, so a store that is made here makes none.

    Args:
        root: A URL without a key and without a query, as ``split_url`` returns it.
        options: Arguments of ``obstore.store.from_url``.
        store: The store to use in place of one that is made of the root.
    """

    def __init__(self, root: str, options: Mapping[str, Any], store: Any = None) -> None:
        self.root = root
        self.options: dict[str, Any] = dict(options)
        self.given = store
        # Whether the server has sent a whole object in place of a part.
        self.ignores_ranges = False
        self._made: dict[str, Any] = {}
        self._surroundings: object = None
        # Counts the stores that were made, so that many expired reads make one new store.
        self._version = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the store that was made here: another process makes its own."""
        return type(self), (self.root, self.options, self.given)

    def store(self, query: str = "") -> tuple[Any, int]:
        """Return the store for the URLs with a query, and its version for ``renew``.

        Raises:
            FeedError: obstore was used before this process was forked, so a read would never end.
            ValueError: The options do not fit the store.
        """
        _runtime.enter()
        with self._lock:
            if query not in self._made:
                store = self._new_store(query)
                if len(self._made) >= QUERIES:
                    del self._made[next(iter(self._made))]
                self._made[query] = store
            return self._made[query], self._version

    def renew(self, version: int, query: str = "") -> None:
        """Make a new store, which obtains credentials again, unless that was done since ``version``."""
        with self._lock:
            if version == self._version:
                self._version += 1
                self._made.clear()

    @property
    def is_outdated(self) -> bool:
        """Whether the environment, or the AWS configuration files, have changed since the store was made."""
        return self.given is None and self._surroundings != _surroundings(self.root, self.options)

    def endpoint(self) -> str | None:
        """Return the server of this store, without credentials; ``None`` for a given store in memory or in a folder."""
        config = self.options if self.given is None else getattr(self.given, "config", None)
        if config is None:
            return None
        account = config.get("account_name", os.environ.get("AZURE_STORAGE_ACCOUNT_NAME"))
        return redacted(f"{_endpoint(config, self.root)} {account} {getattr(self.given, 'prefix', None)}")

    def redact(self, text: str, query: str = "") -> str:
        """Return a text without credentials, also without those in a query."""
        arguments = getattr(self.given, "__getnewargs_ex__", None)
        of_store = {} if arguments is None else arguments()[1]
        return redacted(text, secrets_of(f"{self.root}?{query}", {"store": of_store, **self.options}))

    def _new_store(self, query: str) -> Any:
        if self.given is not None:
            arguments = getattr(self.given, "__getnewargs_ex__", None)
            if not self._version or arguments is None:  # a MemoryStore cannot be made again
                return self.given
            args, kwargs = arguments()
            return type(self.given)(*args, **kwargs)
        self._surroundings = _surroundings(self.root, self.options)
        stores = importlib.import_module("obstore.store")
        scheme = self.root.partition("://")[0]
        profile = _aws_profile(self.options) if scheme == "s3" else {}
        options = {"retry_config": {"max_retries": 0}, **profile, **self.options}
        _check_settings(self.root, options)
        client = {**TIMEOUTS, **options.pop("client_options", {})}
        if "allow_http" in options:  # of obstore's Python classes in earlier versions
            client["allow_http"] = options.pop("allow_http")
        # The user has written http:// here; obstore would refuse it.
        if scheme == "http" or str(_endpoint(options, self.root)).startswith("http://"):
            client.setdefault("allow_http", True)
        make = stores.HTTPStore.from_url if scheme in ("http", "https") else stores.from_url
        failure = None
        try:
            return make(f"{self.root}?{query}" if query else self.root, client_options=client, **options)
        except BaseException as error:  # its text may contain the options
            if not is_of_obstore(error):
                raise
            failure = self.redact(str(error).partition("\n")[0], query)
        raise ValueError(f"{redacted(self.root)}: {failure}")


def shared_client(kind: type[StoreClient], root: str, options: Mapping[str, Any], store: Any = None) -> StoreClient:
    """Return the client of a root and options, one for all sources of this process; a new one for a given ``store``.

    After a change of the environment or of the AWS configuration files, new sources have another client.

    Raises:
        ImportError: obstore is not installed.
    """
    if store is not None:
        return kind(root, options, store)
    if root and importlib.util.find_spec("obstore") is None:
        raise ImportError(_INSTALL)
    key = root, repr((sorted(options.items()), _surroundings(root, options)))
    with _clients_lock:
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = kind(root, options)
        return client


_clients: WeakValueDictionary[tuple[str, str], StoreClient] = WeakValueDictionary()
_clients_lock = threading.Lock()


# How the names of a store's environment variables begin, by the first letter of its URL; none: a given store.
_PREFIXES = {"s": "AWS_", "": "AWS_", "a": "AZURE_", "g": "GOOGLE_"}
_PREFIX = re.compile("^(aws|azure|google)_")
# The URLs of servers; the first one is used in place of the second. Other names of the second.
_SERVERS = ("endpoint_url_s3", "endpoint", "metadata_endpoint")
_ENDPOINTS = dict.fromkeys(("endpoint_url", "storage_endpoint", "base_url"), "endpoint")
_PLAIN = ("access_key_id", "secret_access_key", "session_token", "token", "bearer_token", "region", "default_region")


def _settings(options: Mapping[str, Any], root: str) -> dict[str, tuple[str, Any]]:
    """Return options of a store, or environment variables in their place: the name that was given, and the value."""
    prefix, found = _PREFIXES.get(root[:1], "-"), dict[str, tuple[str, Any]]()
    environment = {name: os.environ[name] for name in sorted(os.environ, reverse=True) if name.startswith(prefix)}
    for given in (options, options.get("config") or {}, environment):
        for name, value in given.items():
            short = _PREFIX.sub("", str(name).lower())
            found.setdefault(_ENDPOINTS.get(short, short), (str(name).lower(), value))
    return found


def _endpoint(options: Mapping[str, Any], root: str) -> Any:
    found = _settings(options, root)
    return next((found[name][1] for name in _SERVERS[:2] if name in found), None)


def _check_settings(root: str, options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for settings at which obstore would panic in the first request."""
    for short, (name, value) in _settings(options, root).items():
        text, plain = redacted(str(value)), str(value).isprintable() and " " not in str(value)
        if short in _SERVERS and value is not None and not (plain and _is_server(str(value))):
            raise ValueError(
                f"{redacted(root)}: the endpoint {text!r} must begin with http:// or https:// and name a server, as "
                f'options={{"{name}": "http://{text.rpartition("//")[2] or "host:9000"}"}}'
            )
        # Secrets that are read from files end with a line break.
        if short in _PLAIN and not plain:
            raise ValueError(f"{redacted(root)}: {name} has a space, a line break or another invisible character")


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:  # the port, or the brackets of an address
        return False


# Settings of an AWS profile, which are names of options, too, and the options that exclude them. A key does not go with
# the token of another, so all of the credentials are taken or none.
_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_PROFILE: dict[tuple[str, ...], set[str]] = {
    _KEYS: {"access_key_id", "credential_provider", "skip_signature"},
    ("region",): {"region", "default_region"},
    ("endpoint_url",): {"endpoint", "endpoint_url_s3"},
}


def _aws_profile(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of the AWS configuration files; obstore reads options and the environment itself."""
    home = Path(os.path.expanduser("~/.aws"))  # stays as it is for a user without a home
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(os.environ.get("AWS_CONFIG_FILE") or home / "config", encoding="utf-8")
    parser.read(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials", encoding="utf-8")
    profile = os.environ.get("AWS_PROFILE") or "default"
    found: dict[str, str] = {}
    for section in (f"profile {profile}", profile):
        found.update(parser[section] if parser.has_section(section) else {})
    given = _settings(options, "s3")
    allowed = [name for settings, others in _PROFILE.items() if others.isdisjoint(given) for name in settings]
    return {name: found[name] for name in allowed if name in found}


# Environment variables, in capital letters, that obstore or its HTTP client read; the prefixes of the stores first.
_VARIABLES = (*ENVIRONMENT, "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_")


def _surroundings(root: str, options: Mapping[str, Any]) -> object:
    """Return what a store is made of beside its options."""
    variables = sorted(item for item in os.environ.items() if item[0].upper().startswith(_VARIABLES))
    return variables, _aws_profile(options) if root.startswith("s3:") else None


class _Runtime:
    """obstore's threads, one set for each process: notices a fork, and lets them finish at interpreter exit.

    A thread of obstore that takes the GIL of an exited interpreter aborts the process below Python 3.14 (CPython
    gh-87135).
    """

    def __init__(self) -> None:
        self.pid = 0
        # Requests that have not ended. Threads of several loops change it, each under the GIL.
        self.open: set[Any] = set()

    def enter(self) -> None:
        pid = os.getpid()
        if self.pid == pid:
            return
        if self.pid:
            raise FeedError(
                "this process is a fork of one that has read from object storage or listed it; the threads of obstore "
                "were not copied, and a read would never end. Start processes with the method 'spawn', or use URLs for "
                "the first time in the forked process"
            )
        self.pid = pid
        threads.register(self)

    def stop(self) -> None:
        """Do nothing: engines cancel their requests."""

    def join(self, timeout_s: float) -> bool:
        """Wait until no request is open and obstore's threads need no GIL."""
        deadline = time.monotonic() + timeout_s
        while self.open and time.monotonic() < deadline:
            time.sleep(_SETTLE_S / 4)
        time.sleep(_SETTLE_S)
        return not self.open


_runtime = _Runtime()
open_requests: set[Any] = _runtime.open
