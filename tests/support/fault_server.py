"""An HTTP server on loopback that speaks enough S3 for tests, and answers with the faults of a schedule.

``python -m tests.support.fault_server --objects 10000 --size 100000 --delay 0.02`` serves ``/bucket/00000000.bin`` and
so on in a process of its own, and prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import psutil

from aiofeed.kernel.runtime.event_loop import new_event_loop
from tests.support.shard_files import tar_of
from tests.support.waiting import until


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    Args:
        delay_s: Seconds until the first byte of the answer.
        status: The status of an error answer; 0 for none.
        code: The code in the body of an error answer, such as "SlowDown".
        location: The URL of a redirect; empty for none.
        cut: The bytes of the body after which the connection is closed.
        trickle_s: Seconds between two bytes of the body; 0 for all at once.
        close: Whether the connection is closed without an answer.
        stall: Whether no answer comes, ever.
        ignore_range: Whether the whole object is sent, with status 200.
        half: Whether the first half of the object is sent, with status 206.
        chunked: Whether the body is sent in a chunk, without its length.
        encoding: The value of Content-Encoding.
    """

    delay_s: float = 0.0
    status: int = 0
    code: str = "InternalError"
    location: str = ""
    cut: int | None = None
    trickle_s: float = 0.0
    close: bool = False
    stall: bool = False
    ignore_range: bool = False
    half: bool = False
    chunked: bool = False
    encoding: str = ""


_NONE = Fault()


@dataclass(frozen=True)
class Request:
    """A request that arrived; ``number`` counts from 0, ``key`` is "bucket/name"."""

    number: int
    method: str
    key: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]


Schedule = Callable[[Request], Fault | None]


@dataclass
class FaultServer:
    """Serves ``objects``, by "bucket/name", in a thread. A ``with`` block starts and stops it.

    ``schedule`` returns the fault of a request; ``requests`` has all requests of the past, unless ``record`` is False.
    ``has_etags`` and ``modified`` are those of all objects. With ``tls``, the endpoint is https.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    schedule: Schedule | None = None
    page: int = 1000
    record: bool = True
    has_etags: bool = True
    modified: str = "Sun, 01 Jan 2023 00:00:00 GMT"
    tls: ssl.SSLContext | None = None
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    count: int = 0
    _etags: dict[str, tuple[bytes, str]] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, object]:
        """The options of a store that is a client of this server."""
        keys = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
        return {"endpoint": self.endpoint, **keys}

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def __enter__(self) -> FaultServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the thread, on the port of before if there was one."""
        started = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        """Close all connections and the port, and wait until the clients of this process have noticed."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        until(
            lambda: not any(each.raddr and each.raddr.port == self.port for each in psutil.Process().net_connections())
        )

    def _main(self, started: threading.Event) -> None:
        self._loop = new_event_loop()
        self._connections: set[asyncio.Transport] = set()
        serve = self._loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port, backlog=1024, ssl=self.tls)
        server = self._loop.run_until_complete(serve)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._abort())
        self._loop.close()

    async def _abort(self) -> None:
        """End all connections, those that were accepted last included: they are reported an iteration later."""
        idle = 0
        while idle < 5:
            for transport in list(self._connections):
                transport.abort()
            idle = 0 if self._connections else idle + 1
            await asyncio.sleep(0)

    def etag(self, key: str) -> str:
        """The etag of an object."""
        data, known = self.objects[key], self._etags.get(key)
        if known is None or known[0] is not data:
            known = self._etags[key] = data, f'"{hashlib.md5(data).hexdigest()}"'
        return known[1]


class _Connection(asyncio.Protocol):
    def __init__(self, server: FaultServer) -> None:
        self._server = server
        self._loop = server._loop
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._server._connections.add(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._server._connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head, self._buffer = self._buffer[:end].decode(), self._buffer[end + 4 :]
            first, *lines = head.split("\r\n")
            method, target, _ = first.split(" ", 2)
            parts = urlsplit(target)
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            server = self._server
            request = Request(server.count, method, unquote(parts.path[1:]), parse_qs(parts.query), headers)
            server.count += 1
            if server.record:
                server.requests.append(request)
            fault = (server.schedule(request) if server.schedule is not None else None) or _NONE
            if fault.stall:
                continue
            if fault.delay_s:
                self._loop.call_later(fault.delay_s, self._answer, request, fault)
            else:
                self._answer(request, fault)

    def _answer(self, request: Request, fault: Fault) -> None:
        if self._transport.is_closing():
            return
        if fault.close:
            self._transport.abort()
        elif fault.location:
            self._send(302, b"", {"Location": fault.location})
        elif fault.status:
            self._error(fault.status, fault.code)
        elif "list-type" in request.query:
            self._send(200, self._page(request.key.rstrip("/"), request.query).encode(), {})
        elif request.key not in self._server.objects:
            self._error(404, "NoSuchKey")
        else:
            self._object(request, fault)

    def _object(self, request: Request, fault: Fault) -> None:
        data, etag = self._server.objects[request.key], self._server.etag(request.key)
        headers = {"Last-Modified": self._server.modified, "Accept-Ranges": "bytes"}
        if self._server.has_etags:
            headers["ETag"] = etag
        if self._server.has_etags and request.headers.get("if-match", etag) != etag:
            return self._error(412, "PreconditionFailed")
        if fault.encoding:
            headers["Content-Encoding"] = fault.encoding
        if fault.half:
            headers["Content-Range"] = f"bytes 0-{len(data) // 2 - 1}/{len(data)}"
            return self._send(206, data[: len(data) // 2], headers, fault)
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if wanted is None or fault.ignore_range:
            return self._send(200, data, headers, fault, body=request.method == "GET")
        first, last = wanted.groups()
        start = int(first) if first else max(len(data) - int(last), 0)
        stop = min(int(last) + 1, len(data)) if first and last else len(data)
        if start >= len(data):
            return self._error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return self._send(206, memoryview(data)[start:stop], headers, fault)

    def _page(self, bucket: str, query: Mapping[str, list[str]]) -> str:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        names = sorted(key.removeprefix(f"{bucket}/") for key in self._server.objects if key.startswith(f"{bucket}/"))
        groups: dict[str, str | None] = {}
        for name in names:
            if name.startswith(prefix) and name > after:
                inner = name[len(prefix) :]
                folder = prefix + inner.split(delimiter)[0] + delimiter if delimiter and delimiter in inner else None
                if folder != after:
                    groups.setdefault(folder or name, folder)
        page, more = list(groups)[: self._server.page], len(groups) > self._server.page
        found = [f"<IsTruncated>{str(more).lower()}</IsTruncated>"]
        if more:
            found.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
        for name in page:
            if groups[name] is not None:
                found.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
                continue
            key = f"{bucket}/{name}"
            found.append(
                f"<Contents><Key>{escape(name)}</Key><Size>{len(self._server.objects[key])}</Size>"
                f"<ETag>{escape(self._server.etag(key))}</ETag><LastModified>2023-01-01T00:00:00.000Z</LastModified>"
                f"</Contents>"
            )
        return f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>{"".join(found)}</ListBucketResult>'

    def _error(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>a fault of the schedule</Message></Error>".encode()
        self._send(status, body, {"Content-Type": "application/xml"})

    def _send(
        self,
        status: int,
        data: bytes | memoryview,
        headers: Mapping[str, str],
        fault: Fault = _NONE,
        *,
        body: bool = True,
    ) -> None:
        length = "Transfer-Encoding: chunked" if fault.chunked else f"Content-Length: {len(data)}"
        if fault.chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        lines = [f"HTTP/1.1 {status} x", length, *[f"{k}: {v}" for k, v in headers.items()]]
        self._transport.write("\r\n".join([*lines, "\r\n"]).encode())
        if body and fault.trickle_s:
            self._trickle(data, fault.trickle_s)
        elif body:
            self._transport.write(data[: fault.cut])
        if fault.cut is not None:
            self._transport.close()

    def _trickle(self, data: bytes | memoryview, pause_s: float) -> None:
        if data and not self._transport.is_closing():
            self._transport.write(data[:1])
            self._loop.call_later(pause_s, self._trickle, data[1:], pause_s)


def start_obstore() -> None:
    """Start obstore's threads. They open descriptors, once, and keep them."""
    from obstore.store import MemoryStore

    MemoryStore().put("started", b"")


def files_of(folder: Path) -> dict[str, bytes]:
    """The files below a folder as objects of "bucket"."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {f"bucket/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in paths}


def main() -> None:
    """Serve equal objects, or the files of a folder, until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--objects", type=int, default=1000)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--members", type=int, default=0, help="objects are tar files with so many .jpg of --size")
    parser.add_argument("--folder", type=Path, help="serves its files in place of equal objects")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds until the first byte")
    parser.add_argument("--slow-every", type=int, default=0, help="each so many requests, one is slow")
    parser.add_argument("--slow", type=float, default=1.0, help="seconds until the first byte of a slow one")
    arguments = parser.parse_args()
    data = bytes(arguments.size)
    if arguments.members:
        data = tar_of((f"{number:06}.jpg", data) for number in range(arguments.members))
    usual, slow = Fault(delay_s=arguments.delay), Fault(delay_s=arguments.slow)
    every = arguments.slow_every
    server = FaultServer(
        files_of(arguments.folder)
        if arguments.folder
        else {f"bucket/{number:08}.bin": data for number in range(arguments.objects)},
        schedule=lambda request: slow if every and request.number % every == every - 1 else usual,
        record=False,
    )
    server.start()
    print(server.port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
