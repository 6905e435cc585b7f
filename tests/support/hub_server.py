"""A server on loopback that speaks the part of the Hugging Face Hub's HTTP that reads repositories.

Large files are redirected to signed URLs, as those in Git LFS or Xet; files of fewer than ``LARGE`` bytes are sent by
the Hub itself, to those who send the token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE = 200
PAGE = 3


def commit_of(text: str) -> str:
    """A commit for each text."""
    return hashlib.sha1(text.encode()).hexdigest()


@dataclass
class HubServer:
    """Serves ``repositories``: by "datasets/owner/name" and commit the files, by path.

    ``fault(method, path)`` returns the status and the headers of an answer in place of the usual one, or ``None``.
    """

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=lambda: {"main": commit_of("1")})
    token: str | None = None
    fault: Callable[[str, str], tuple[int, dict[str, str]] | None] = lambda method, path: None
    # URLs are valid while they have this signature.
    signature: str = "signature-1"
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def __enter__(self) -> HubServer:
        hub = self

        class Handler(_Handler):
            server_of = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._cdn = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._cdn.daemon_threads = True
        self.cdn = f"http://127.0.0.1:{self._cdn.server_port}"
        for server in (self._server, self._cdn):
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self._server, self._cdn):
            server.shutdown()
            server.server_close()

    def paths(self, part: str) -> list[str]:
        """The requests whose path has a part, as "METHOD path"."""
        return [f"{method} {path}" for method, path, _ in self.requests if part in path]


class _Handler(BaseHTTPRequestHandler):
    server_of: HubServer
    protocol_version = "HTTP/1.0"  # a connection for each request, so that none is left

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, parts = self.server_of, urlsplit(self.path)
        hub.requests.append((self.command, self.path, self.headers["authorization"]))
        if (fault := hub.fault(self.command, self.path)) is not None:
            self._send(fault[0], b"a fault", fault[1])
        elif parts.path.startswith("/cdn/"):
            self._signed(parts.path, parts.query)
        elif hub.token is not None and self.headers["authorization"] != f"Bearer {hub.token}":
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif parts.path.startswith("/api/"):
            self._api(parts.path.removeprefix("/api/"), parse_qs(parts.query))
        else:
            self._resolve(parts.path[1:])

    def _files(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.server_of.repositories.get(repository)
        commit = self.server_of.branches.get(unquote(revision), revision)
        if commits is None or commit not in commits:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound" if commits is None else "RevisionNotFound"})
            return None
        return commit, commits[commit]

    def _api(self, path: str, query: dict[str, list[str]]) -> None:
        match = re.fullmatch(r"(\w+/[^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", path)
        assert match is not None
        if (found := self._files(match[1], match[3] or "main")) is None:
            return
        commit, files = found
        if match[2] != "tree":
            self._json({"_id": "1", "id": match[1].partition("/")[2], "sha": commit})
            return
        folder, recursive = unquote(match[4] or ""), query.get("recursive") in (["True"], ["true"])
        base = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, object]] = {}
        for name, data in sorted(files.items()):
            if name.startswith(base):
                inner = name[len(base) :].split("/")
                for depth in range(1, len(inner) if recursive else min(len(inner), 2)):
                    folder_path = base + "/".join(inner[:depth])
                    entries[folder_path] = {"type": "directory", "path": folder_path, "oid": "t", "size": 0}
                if recursive or len(inner) == 1:
                    entries[name] = {"type": "file", "path": name, "size": len(data), "oid": commit_of(name)}
        if not entries:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        first = int(query.get("cursor", ["0"])[0])
        more = {}
        if first + PAGE < len(entries):
            listed = "&".join(f"{name}={value[0]}" for name, value in query.items() if name != "cursor")
            more["Link"] = f'<{self.server_of.endpoint}/api/{path}?{listed}&cursor={first + PAGE}>; rel="next"'
        self._json(list(entries.values())[first : first + PAGE], more)

    def _resolve(self, path: str) -> None:
        match = re.fullmatch(r"((?:datasets/|spaces/)?[^/]+/[^/]+)/resolve/([^/]+)/(.*)", path)
        assert match is not None
        repository = match[1] if match[1].count("/") == 2 else f"models/{match[1]}"
        if (found := self._files(repository, match[2])) is None:
            return
        (commit, files), name = found, unquote(match[3])
        if name not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{commit_of(name)}"'}
        if len(files[name]) < LARGE:
            self._object(files[name], headers)
            return
        at = f"{self.server_of.cdn}/cdn/{repository}/{commit}/{quote(name)}?Signature={self.server_of.signature}"
        linked = {"X-Linked-Size": str(len(files[name])), "X-Linked-ETag": f'"{"b" * 64}"', "Location": at}
        self._send(302, b"", headers | linked)

    def _signed(self, path: str, query: str) -> None:
        kind, owner, name, commit, file = path.removeprefix("/cdn/").split("/", 4)
        if query != f"Signature={self.server_of.signature}":
            self._send(403, b"<Error><Message>AccessDenied</Message></Error>", {})
            return
        data = self.server_of.repositories[f"{kind}/{owner}/{name}"][commit][unquote(file)]
        self._object(data, {"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def _object(self, data: bytes, headers: dict[str, str]) -> None:
        headers |= {"Last-Modified": "Sun, 01 Jan 2023 00:00:00 GMT", "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["range"] or "")
        if wanted is None:
            self._send(200, data, headers)
            return
        first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        self._send(206, data[first : last + 1], headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _json(self, value: object, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
