"""No message about an argument shows the password or the signature of a URL."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import aiofeed
from aiofeed.kernel.core.formatting import redacted
from aiofeed.kernel.core.types import hides_secrets

URL = "ftp://user:p@ss-SECRET@127.0.0.1:1/train/?sig=SECRETSECRET&x=1"
FORMS: dict[str, Any] = {"str": URL, "list": [URL], "dict": {URL: 1}, "tuple": (URL, 2)}
VALID: dict[str, Any] = {"source": aiofeed.Tensors(torch.arange(8)), "batch_size": 2}


def public_calls() -> Iterator[str]:
    """The public classes and functions that a program calls, without those that wait for a server."""
    for module in (aiofeed, aiofeed.processes, aiofeed.exporters):
        for name in module.__all__:
            value = getattr(module, name)
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            if callable(value) and not is_error and name not in ("Decoder", "Source", "attach", "attach_tensors"):
                yield f"{module.__name__}.{name}"


def shown_by(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """What a call shows: its error with all causes, without lines of source code."""
    try:
        function(*arguments, **named)
    except Exception as error:
        lines = traceback.format_exception(error)
        return "".join(line for line in lines if not line.startswith("  File"))
    return ""


@pytest.mark.parametrize("name", list(public_calls()))
def test_no_argument_shows_its_secret(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL as any argument, alone or within another object, is in no message with its password or signature."""
    monkeypatch.chdir(tmp_path)
    module, _, attribute = name.rpartition(".")
    target: Any = getattr(aiofeed if module == "aiofeed" else getattr(aiofeed, module.partition(".")[2]), attribute)
    parameters = [each for each in inspect.signature(target).parameters.values() if each.kind.value not in (2, 4)]
    required = {each.name: VALID.get(each.name, "x") for each in parameters if each.default is each.empty}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in parameters:
            for form, value in FORMS.items():
                given = {**required, each.name: value}
                positional = [given.pop(at.name) for at in parameters if at.kind.value == 0 and at.name in given]
                assert "SECRET" not in shown_by(target, *positional, **given), f"{each.name}={form}"


@pytest.mark.parametrize("form", FORMS)
def test_no_state_shows_its_secret(form: str) -> None:
    """Nor is one of a state, or a part of it."""
    feeder = aiofeed.Feeder(**VALID)
    saved = feeder.state_dict()
    states = [FORMS[form], *({**saved, name: FORMS[form]} for name in saved)]
    assert not any("SECRET" in shown_by(feeder.load_state_dict, state) for state in states)


def test_the_causes_of_an_error_show_no_secret() -> None:
    """All errors that a traceback prints are changed, each once."""

    @hides_secrets
    def fails() -> None:
        try:
            raise ValueError(URL)
        except ValueError as error:
            raise TypeError(f"got {URL!r}") from error

    with pytest.raises(TypeError) as raised:
        fails()
    assert "SECRET" not in f"{raised.value} {raised.value.__cause__}"
    assert "127.0.0.1" in str(raised.value)


@pytest.mark.parametrize("password", ["plain", "a@b", "a@b@c", "a:b@c", "%40@"])
def test_a_password_ends_at_the_last_at_sign(password: str) -> None:
    """Before the host; an "@" in the path is no end of it."""
    url = f"http://user:{password}@host:1/a@b.jpg"
    assert redacted(f"cannot read {url}: gone") == "cannot read http://***@host:1/a@b.jpg: gone"


@pytest.mark.parametrize("password", ["it's", 'a"b', "a<b>c", "(a)", "a,b;c", "{a}", "a\\b", "$a!*"])
def test_a_password_of_any_characters_is_hidden(password: str) -> None:
    """Quotes and brackets do not end a password."""
    source = aiofeed.Files([f"http://user:{password}SECRET@127.0.0.1:1/a.jpg"], options={"retry_timeout": 0})
    assert "SECRET" not in source.key(0)
    assert redacted(f"cannot read http://user:{password}SECRET@host/a.jpg") == "cannot read http://***@host/a.jpg"


class Signed:
    """A source whose keys and errors have secrets."""

    def __init__(self, *, readable: bool) -> None:
        self.readable = readable

    def __len__(self) -> int:
        return 4

    def key(self, index: int) -> str:
        return f"{URL}&{index}"

    async def read(self, index: int) -> bytes:
        if self.readable:
            return b""
        raise OSError(f"no {URL}")


@pytest.mark.parametrize("readable", [False, True])
def test_failures_of_samples_show_no_secret(readable: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Neither in a message, nor in a line of the log, nor in what explains the epoch."""
    policy, source = aiofeed.FailurePolicy("skip", max_failures=10), Signed(readable=readable)
    with aiofeed.Feeder(source, decode=lambda data: data[0], batch_size=2, on_error=policy) as feeder:
        with contextlib.suppress(aiofeed.errors.BatchFailedError):
            list(feeder)
        texts = [str(failure.error) for failure in feeder.failures]
        assert "SECRET" not in f"{texts} {feeder.explain()} {caplog.text}"
        assert "127.0.0.1" in texts[0]


CALLS: dict[str, Callable[[Any], Any]] = {
    "split": aiofeed.Files(["a", "b"]).split,
    "indices": aiofeed.Files(["a", "b"]).__getitem__,
    "epochs": aiofeed.Feeder(**VALID).epochs,
    "steps": aiofeed.Feeder(**VALID).steps,
    "skip": aiofeed.Feeder(**VALID).skip,
    "set_epoch": aiofeed.Feeder(**VALID).set_epoch,
    "sampler": lambda value: list(aiofeed.Feeder(**VALID, sampler=[value])),
    "batch_sampler": lambda value: list(aiofeed.Feeder(VALID["source"], batch_sampler=[[value]])),
    "stream": lambda value: list(aiofeed.Feeder(aiofeed.Stream(lambda: value), batch_size=2, decode=len)),
    "state of DataLoader": lambda value: aiofeed.DataLoader([1, 2]).load_state_dict({"version": value}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("form", FORMS)
def test_no_argument_of_a_method_shows_its_secret(name: str, form: str) -> None:
    """What methods and samplers get is shown as what constructors get."""
    assert "SECRET" not in shown_by(CALLS[name], FORMS[form])


def test_a_long_argument_hides_the_end_of_its_url() -> None:
    """A message that shortens an argument looks for URLs in all of it."""
    with pytest.raises(TypeError, match="a str with a URL"):
        aiofeed.Files(["a"])["x" * 40 + URL]


def test_no_addon_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors hide the secrets of URLs also where the add-on that reads URLs is missing."""
    monkeypatch.setitem(sys.modules, "aiofeed.objects", None)
    monkeypatch.setitem(sys.modules, "aiofeed.objects.urls", None)
    error = aiofeed.FeedError("no answer from https://user:SECRET@host/a.jpg?sig=SECRET")
    assert str(error) == "no answer from https://***@host/a.jpg?sig=***"
