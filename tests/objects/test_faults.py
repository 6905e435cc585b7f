import asyncio
import logging
import multiprocessing
import pickle
import shutil
import ssl
import subprocess
import threading
import traceback
from urllib.parse import quote

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiofeed.objects import reader as reader_module
from aiofeed.objects.clients import _aws_profile
from aiofeed.objects.reader import ObjectReader, statistics_of
from tests.support.examples import examples
from tests.support.fault_server import Fault, FaultServer
from tests.support.waiting import until

EXAMPLES = examples(50)
DATA = bytes(range(256)) * 16


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(reader_module, "backoff_s", lambda attempt, jitter: 0.001)


@pytest.fixture
def reader(server):
    server.objects["bucket/a"] = DATA
    return ObjectReader("s3://bucket", options=server.options)


def first(*faults):
    """A schedule of these faults for the first requests."""
    return lambda request: faults[request.number] if request.number < len(faults) else None


TRANSIENT = {
    "500": Fault(status=500),
    "503": Fault(status=503, code="SlowDown"),
    "429": Fault(status=429),
    "408": Fault(status=408),
    "403": Fault(status=403, code="userRateLimitExceeded"),
    "no body": Fault(cut=0),
    "cut": Fault(cut=10),
    "closed": Fault(close=True),
    "half": Fault(half=True),
    "chunked": Fault(chunked=True),
}


@pytest.mark.parametrize("fault", TRANSIENT.values(), ids=TRANSIENT)
async def test_transient_faults_are_retried(reader, server, fault, caplog):
    """A request that fails for a moment is sent again until it succeeds; this is counted and logged once."""
    server.schedule = first(fault, fault, fault)
    assert await reader.read("a") == DATA
    assert (statistics_of([reader]).retries, statistics_of([reader]).requests, server.count) == (3, 4, 4)
    server.schedule = lambda request: fault if request.number == 4 else None
    assert await reader.read_ranges("a", [0, 9], [4, 20]) == [DATA[:4], DATA[9:20]]
    assert server.count == 6
    assert caplog.text.count("sent again") == 1


@pytest.mark.parametrize("status", [300, 400, 404, 410, 412, 416])
@pytest.mark.parametrize("scheme", ["s3", "http"])
async def test_other_answers_are_not_retried(reader, server, status, scheme):
    """An answer that another attempt does not change is an error after one request, with the URL."""
    if scheme == "http":
        reader = ObjectReader(f"{server.endpoint}/bucket")
    server.schedule = lambda request: Fault(status=status)
    with pytest.raises(OSError, match=f"{scheme}://.*/a") as raised:
        await reader.read_ranges("a", [0], [1])
    assert "Generic" not in str(raised.value)
    assert server.count == 1


async def test_denied_access_is_not_retried(reader, server):
    """Denied access is a ``PermissionError`` after one request, with the code of the store."""
    server.schedule = lambda request: Fault(status=403, code="AccessDenied")
    with pytest.raises(PermissionError, match=r"access is denied.*AccessDenied.*s3://bucket/a"):
        await reader.read("a")
    assert server.count == 1


async def test_a_server_that_ignores_ranges(reader, server):
    """A whole object in answer to a range is an error that says so, not wrong bytes."""
    server.schedule = lambda request: Fault(ignore_range=True)
    with pytest.raises(OSError, match="ignores requests for a part"):
        await reader.read_ranges("a", [10], [20])


@pytest.mark.parametrize("scheme", ["s3", "http"])
async def test_half_of_an_object_is_never_the_object(reader, server, scheme, monkeypatch):
    """A server that always sends a part with status 206, or no length, is an error; an answer of this kind is not used.

    A server that sends such a part only if no part is requested is read by requests for parts.
    """
    monkeypatch.setattr(reader_module, "FIRST_RETRY_S", 0.1)
    if scheme == "http":
        reader = ObjectReader(f"{server.endpoint}/bucket")
    for fault, message in (
        (Fault(half=True), r"sends another part than requested: .*://.*/a"),
        (Fault(chunked=True), r"does not send the length of the object: .*://.*/a"),
    ):
        server.schedule = lambda request, fault=fault: fault
        with pytest.raises(OSError, match=message):
            await reader.read("a")
        with pytest.raises(OSError, match=message):
            await reader.read_ranges("a", [0, 3000], [10, 4096])
    server.schedule = lambda request: None if "range" in request.headers else Fault(half=True)
    assert await reader.read("a") == DATA


async def test_objects_of_any_size_are_one_request(reader, server):
    """The size of an object is known from the answer that has its bytes; an empty one needs another request."""
    for number, size in enumerate([1, 4096, 1 << 20]):
        server.objects["bucket/b"] = bytes(size)
        assert await reader.read("b") == bytes(size)
        assert server.count == number + 1
    server.objects["bucket/b"] = b""
    assert await reader.read("b") == b""
    server.schedule = lambda request: Fault(ignore_range=True)
    for requests in (2, 1):  # that the server ignores ranges is remembered
        before = server.count
        assert await reader.read("a") == DATA
        assert server.count - before == requests


@pytest.mark.parametrize("status", [400, 405, 416, 501])
async def test_gateways_that_refuse_ranges(reader, server, status):
    """A whole object is requested without a range if that is refused, which is remembered."""
    server.schedule = lambda request: Fault(status=status, code="X") if "range" in request.headers else None
    for requests in (2, 1):
        before = server.count
        assert await reader.read("a") == DATA
        assert server.count - before == requests


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "Gzip, aws-chunked", "aws-chunked", "identity"])
async def test_compressed_answers_are_refused(reader, server, encoding):
    """Bytes that are compressed in transit, or were for the store, are not the object; those of a .gz file are."""
    server.objects["bucket/a.csv.gz"] = DATA
    server.schedule = lambda request: Fault(encoding=encoding)
    if encoding in ("aws-chunked", "identity"):  # what clients of S3 have left behind; the bytes are plain
        assert await reader.read("a") == DATA
        return
    for read in (reader.read("a"), reader.read_ranges("a", [0], [9]), reader.read("a", size=len(DATA))):
        with pytest.raises(OSError, match=f"(?i)Content-Encoding {encoding[:4]}.*s3://bucket/a"):
            await read
    if encoding == "gzip":
        server.objects["bucket/a.TGZ"] = DATA
        assert await reader.read("a.csv.gz") == await reader.read("a.TGZ") == DATA


async def test_an_outage_ends_in_an_error(reader, server, monkeypatch):
    """After the time limit for retries, the last fault is the error."""
    monkeypatch.setattr(reader_module, "RETRY_S", 0.1)
    server.schedule = lambda request: Fault(status=503, code="SlowDown")
    with pytest.raises(OSError, match=r"503.*SlowDown.*s3://bucket/a"):
        await reader.read("a")
    assert server.count > 5


async def test_a_wrong_host_fails_early(server, monkeypatch, caplog):
    """A host that has never answered is given up after a shorter time, which the log line names.

    The error says that the name of the host is unknown.
    """
    monkeypatch.setattr(reader_module, "FIRST_RETRY_S", 0.1)
    options = {**server.options, "endpoint": f"http://{'x' * 64}.invalid"}
    with pytest.raises(OSError, match=r"host name.*s3://bucket/a"):
        await ObjectReader("s3://bucket", options=options).read("a")
    assert "sent again for up to 0 s" in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_a_certificate_that_is_not_accepted(tmp_path, caplog):
    """A certificate of an unknown issuer is an error after one request, with the reason."""
    files = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", files[0], "-out", files[1], "-subj", "/CN=localhost", "-addext", "basicConstraints=CA:FALSE"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files[1], files[0])
    with FaultServer(tls=context) as server:
        reader = ObjectReader(server.endpoint)
        with pytest.raises(OSError, match=r"\(InvalidCertificate: UnknownIssuer\): https://127.0.0.1"):
            await reader.read("a")
    assert statistics_of([reader]).requests == 1


@pytest.mark.parametrize(
    ("location", "reason"), [("http://127.0.0.1:{port}/bucket/a", "TooManyRedirects"), ("ftp://host/a", "BadScheme")]
)
async def test_a_redirect_that_cannot_be_followed(server, location, reason):
    """A redirect without an end, or to another kind of URL, is an error after one request, whatever came before."""
    server.objects["bucket/b"] = DATA
    target = location.format(port=server.port)
    server.schedule = lambda request: Fault(location=target) if request.key == "bucket/a" else None
    reader = ObjectReader(f"{server.endpoint}/bucket")
    assert await reader.read("b") == DATA
    with pytest.raises(OSError, match=rf"\({reason}\): http.*/a$"):
        await reader.read("a")
    assert statistics_of([reader]).requests == 2


async def test_odd_keys_behind_a_redirect(server):
    """A key is read behind a redirect; one with brackets, of which obstore follows no redirect, is an error."""
    keys = ["a b", "é#?&=", "%41", "+;,@!$'()*", "x:y~{z}"]
    server.objects.update({f"target/{key}": key.encode() for key in keys})

    def redirect(request):
        folder, _, key = request.key.partition("/")
        return Fault(location=f"{server.endpoint}/target/{quote(key)}") if folder == "bucket" else None

    server.schedule = redirect
    reader = ObjectReader(f"{server.endpoint}/bucket")
    assert [(await reader.read(key)).decode() for key in keys] == keys
    with pytest.raises(OSError, match=r"302.*\[z\]$"):
        await reader.read("x[z]")
    assert statistics_of([reader]).retries == 0


async def test_a_server_that_comes_back(reader, server):
    """Reads go on when a server that died is there again."""
    assert await reader.read("a") == DATA
    await asyncio.to_thread(server.stop)
    reads = [asyncio.create_task(reader.read("a")) for _ in range(5)]
    await asyncio.to_thread(until, lambda: statistics_of([reader]).retries)
    await asyncio.to_thread(server.start)
    assert await asyncio.gather(*reads) == [DATA] * 5


async def test_an_object_that_is_replaced_between_parts(reader, server, monkeypatch):
    """A large object that is replaced while its parts are read is an error, not a mixture of both."""
    monkeypatch.setattr(reader_module, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(reader_module, "PART_BYTES", 1000)

    def replace(request):
        if request.number == 2:
            server.objects["bucket/a"] = DATA[::-1]

    server.schedule = replace
    with pytest.raises(OSError, match="has changed"):
        await reader.read("a")


READS = {
    "whole": (2, lambda reader, info: reader.read("a")),
    "a long range": (2, lambda reader, info: reader.read_ranges("a", [0], [4000])),
    "ranges": (2, lambda reader, info: reader.read_ranges("a", [0, 2000, 3000], [9, 2009, 3009])),
    "after head": (0, lambda reader, info: reader.read_ranges("a", [0], [9], info=info)),
}


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("what", ["time", "size"])
@pytest.mark.parametrize(("replaced_at", "read"), READS.values(), ids=READS)
async def test_a_server_without_etags(server, monkeypatch, scheme, what, replaced_at, read):
    """Without etags, parts of an object that differ in the time of change or in the object's size are an error."""
    monkeypatch.setattr(reader_module, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(reader_module, "PART_BYTES", 1000)
    monkeypatch.setattr(reader_module, "GAP_BYTES", 0)
    server.objects["bucket/a"], server.has_etags = DATA, False
    in_bucket = ObjectReader("s3://bucket", options=server.options)
    reader = in_bucket if scheme == "s3" else ObjectReader(f"{server.endpoint}/bucket")
    info = await reader.head("a")
    assert info.etag is None
    assert await reader.read("a") == DATA
    first_request = server.count

    def replace(request):
        if request.number == first_request + replaced_at:
            server.objects["bucket/a"] = DATA[::-1] + (b"x" if what == "size" else b"")
            server.modified = "Mon, 02 Jan 2023 00:00:00 GMT" if what == "time" else server.modified

    server.schedule = replace
    with pytest.raises(OSError, match=r"has changed.*a$"):
        await read(reader, info)


# --- credentials


async def test_expired_credentials_are_obtained_again(server, tmp_path, monkeypatch):
    """Reads whose credentials have expired obtain them again from the configuration file, once, and go on."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "research")
    (tmp_path / "config").write_text(
        f"[profile research]\nregion = eu-central-1\nendpoint_url = {server.endpoint}\n[default]\nregion = us-east-1\n"
    )

    def write(key):
        lines = f"aws_access_key_id = {key}\naws_secret_access_key = secret-{key}\naws_session_token = token-{key}"
        (tmp_path / "credentials").write_text(f"[research]\n{lines}\n[default]\naws_access_key_id = other\n")

    write("FIRST")
    server.objects["bucket/a"] = DATA
    valid = ["FIRST"]

    def check(request):
        credential = request.headers["authorization"].partition("Credential=")[2].partition("/")[0]
        token = request.headers["x-amz-security-token"]
        return (
            None if (credential, token) == (valid[0], f"token-{valid[0]}") else Fault(status=403, code="ExpiredToken")
        )

    server.schedule = check
    reader = ObjectReader("s3://bucket")
    assert await reader.read("a") == DATA
    assert "/eu-central-1/" in server.requests[0].headers["authorization"]
    write("SECOND")
    valid[0] = "SECOND"
    assert await asyncio.gather(*[reader.read("a") for _ in range(20)]) == [DATA] * 20
    assert 1 <= statistics_of([reader]).retries <= 20
    before = server.count
    valid[0] = "THIRD"  # and the file has no new ones
    with pytest.raises(PermissionError, match="credentials have expired"):
        await reader.read("a")
    assert server.count - before == 2


@pytest.mark.parametrize("wrong", ["endpoint", "credentials", "file"])
async def test_the_environment_is_changed(server, tmp_path, monkeypatch, wrong):
    """A change of the environment or of a configuration file has an effect on new readers, and on those that failed."""
    monkeypatch.setattr(reader_module, "FIRST_RETRY_S", 0.0)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1" if wrong == "endpoint" else server.endpoint)
    if wrong == "file":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        (tmp_path / "config").write_text("[default]\naws_access_key_id = WRONG\naws_secret_access_key = x")
    else:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "WRONG" if wrong == "credentials" else "RIGHT")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    server.objects["bucket/a"] = DATA
    server.schedule = lambda request: Fault(status=403 if "=WRONG/" in request.headers["authorization"] else 0)
    old = ObjectReader("s3://bucket")
    with pytest.raises(OSError, match="s3://bucket/a"):
        await old.read("a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    if wrong == "file":
        (tmp_path / "config").write_text("[default]\naws_access_key_id = RIGHT\naws_secret_access_key = x")
    else:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "RIGHT")
    new = ObjectReader("s3://bucket")
    assert await new.read("a") == DATA
    assert statistics_of([new]).requests == 1
    assert await old.read("a") == DATA
    assert ObjectReader("s3://bucket")._client is new._client


def test_empty_variables_are_not_set(tmp_path, monkeypatch):
    """The profile is the default one, of the default files."""
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_PROFILE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[default]\nregion = eu-central-1\n")
    assert _aws_profile({}) == {"region": "eu-central-1"}


async def test_credentials_are_not_mixed(server, tmp_path, monkeypatch):
    """With credentials in the options, none is taken from the configuration file, but its region is."""
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    (tmp_path / "config").write_text("[default]\nregion = eu-central-1\nendpoint_url = http://127.0.0.1:1\n")
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = FILE\naws_secret_access_key = x\naws_session_token = y\n"
    )
    server.objects["bucket/a"] = DATA
    options = {"aws_access_key_id": "OPTION", "aws_secret_access_key": "x", "aws_endpoint": server.endpoint}
    assert await ObjectReader("s3://bucket", options=options).read("a") == DATA
    headers = server.requests[0].headers
    assert "Credential=OPTION/" in headers["authorization"]
    assert "/eu-central-1/" in headers["authorization"]
    assert "x-amz-security-token" not in headers


async def test_a_given_store_obtains_credentials_again(server):
    """A store that the user made, with a provider of credentials, is made again when these have expired."""
    from obstore.store import S3Store

    server.objects["bucket/a"] = DATA
    calls = []

    def provider():
        calls.append(len(calls))
        return {"access_key_id": f"KEY{len(calls)}", "secret_access_key": "x" * 20, "expires_at": None}

    store = S3Store(
        "bucket", endpoint=server.endpoint, client_options={"allow_http": True}, credential_provider=provider
    )
    server.schedule = lambda request: Fault(status=401) if "KEY1/" in request.headers["authorization"] else None
    assert await ObjectReader("", store=store).read("a") == DATA
    assert len(calls) == 2


SECRETS = ["hunter-user", "hunter-pass", "hunter-sig", "hunter-key", "hunter-env", "hunter-token"]


@pytest.mark.parametrize("kind", ["s3", "http", "key", "given"])
@pytest.mark.parametrize("status", [0, 400, 403, 404, 503])
async def test_no_credential_is_shown(server, kind, status, monkeypatch, caplog):
    """No log line, error or repr has a credential of the URL, of the options or of the environment."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter-env")
    monkeypatch.setattr(reader_module, "RETRY_S", 0.01)
    monkeypatch.setattr(reader_module, "FIRST_RETRY_S", 0.01)
    options, key = {**server.options, "secret_access_key": "hunter-key", "token": "hunter-token"}, "a"
    if kind == "key":
        reader, key = ObjectReader(f"{server.endpoint}/bucket"), "a\0sig=hunter-sig"
    elif kind == "http":
        url = server.endpoint.replace("http://", "http://hunter-user:hunter-pass@") + "/bucket?sig=hunter-sig"
        reader = ObjectReader(url)
    elif kind == "given":
        from obstore.store import S3Store

        store = S3Store("bucket", **options, client_options={"allow_http": True}, retry_config={"max_retries": 0})
        reader = ObjectReader("", store=store)
    else:
        reader = ObjectReader("s3://bucket", options=options)
    # Some servers repeat the request in the text of an error.
    server.schedule = lambda request: Fault(status=status, close=not status, code=f"sent: {' '.join(SECRETS)}")
    with pytest.raises(OSError, match="a") as raised:
        await reader.read(key)
    shown = ["".join(traceback.format_exception(raised.value)), repr(raised.value), repr(reader), caplog.text]
    error = raised.value
    while error is not None:
        shown.append(f"{error!r} {error}")
        error = error.__context__
    known = (
        SECRETS[:3]
        if kind == "http"
        else SECRETS[2:3]
        if kind == "key"
        else ["hunter-key", "hunter-token", "hunter-env"]
    )
    for secret in known:
        assert secret not in " ".join(shown)


# --- processes and loops


async def test_cancelling_ends_the_request(server):
    """A cancelled read closes its connection at once."""
    server.objects["bucket/a"] = DATA
    server.schedule = lambda request: Fault(stall=True)
    reader = ObjectReader("s3://bucket", options=server.options)
    task = asyncio.create_task(reader.read("a"))
    await asyncio.to_thread(until, lambda: server.count)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until, lambda: not server.connections)


def read_in_child(reader, queue):
    try:
        queue.put(asyncio.run(reader.read("a")))
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")


def test_a_forked_process(reader):
    """A forked process that reads gets an error at once; obstore would never answer there."""
    assert asyncio.run(reader.read("a")) == DATA
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=read_in_child, args=(reader, queue))
    child.start()
    found = queue.get()
    child.join()
    assert found.startswith("FeedError: this process is a fork")


def test_a_pickled_reader(reader):
    """A pickled reader has the same root and options, and a client and figures of its own."""
    assert asyncio.run(reader.read("a")) == DATA
    copied = pickle.loads(pickle.dumps(reader))
    assert asyncio.run(copied.read("a")) == DATA
    assert statistics_of([copied]).requests == 1


def test_several_loops(reader):
    """Loops in several threads, and one after the other, share a reader; its figures are those of all."""
    found = []

    def main():
        async def read_all():
            return await asyncio.gather(*[reader.read("a") for _ in range(10)])

        for _ in range(3):
            found.extend(asyncio.run(read_all()))

    threads = [threading.Thread(target=main) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [DATA] * 90
    assert statistics_of([reader]).requests == 90
    assert len(reader._monitors) <= 3


# --- random schedules

FAULTS = st.one_of(
    st.none(),
    st.sampled_from([Fault(status=status) for status in (500, 503, 429)]),
    st.builds(Fault, cut=st.integers(0, len(DATA) - 1)),
    st.builds(Fault, delay_s=st.sampled_from([0.001, 0.01])),
    st.just(Fault(close=True)),
)
SHORTEST = len(DATA) - 8
RANGES = st.lists(st.tuples(st.integers(0, SHORTEST), st.integers(0, SHORTEST)).map(sorted), max_size=6)


@pytest.mark.parametrize("gap", [0, 64])
def test_random_schedules(server, monkeypatch, gap):
    """Whatever faults come in whatever order, each read returns its own bytes."""
    monkeypatch.setattr(reader_module, "GAP_BYTES", gap)
    monkeypatch.setattr(reader_module, "PART_BYTES", 1000)
    monkeypatch.setattr(reader_module, "WHOLE_BYTES", 4092)
    server.objects.update({f"bucket/{name}": DATA[name:] for name in range(8)})
    reader = ObjectReader("s3://bucket", options=server.options)

    @hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
    @given(st.lists(FAULTS, max_size=40), st.lists(RANGES, min_size=1, max_size=8))
    def check(faults, ranges):
        server.count = 0
        server.requests.clear()
        server.schedule = first(*faults)

        async def read_all():
            whole = asyncio.gather(*[reader.read(str(name)) for name in range(8)])
            parts = [
                reader.read_ranges(str(name), [start for start, _ in each], [end for _, end in each])
                for name, each in enumerate(ranges)
            ]
            return await whole, await asyncio.gather(*parts)

        whole, parts = asyncio.run(read_all())
        assert whole == [DATA[name:] for name in range(8)]
        assert parts == [[DATA[name:][start:end] for start, end in each] for name, each in enumerate(ranges)]

    check()


async def test_a_large_object_of_a_server_that_ignores_ranges(server, monkeypatch):
    """A large object is read as one if the server sends whole objects only."""
    monkeypatch.setattr(reader_module, "WHOLE_BYTES", 1000)
    server.objects["bucket/a"] = DATA
    server.schedule = lambda request: Fault(ignore_range=True)
    assert await ObjectReader(f"{server.endpoint}/bucket").read("a") == DATA


async def test_weak_etags(server, monkeypatch):
    """A weak etag, which is not allowed as a condition, is compared with that of the answer."""
    server.objects["bucket/a"] = DATA
    monkeypatch.setattr(type(server), "etag", lambda self, key: f'W/"{len(self.objects[key])}"')
    reader = ObjectReader(f"{server.endpoint}/bucket")
    info = await reader.head("a")
    assert info.etag == f'W/"{len(DATA)}"'
    assert await reader.read_ranges("a", [0], [9], info=info) == [DATA[:9]]
    assert "if-match" not in server.requests[-1].headers
    server.objects["bucket/a"] = DATA[1:]
    with pytest.raises(OSError, match="has changed"):
        await reader.read_ranges("a", [0], [9], info=info)
