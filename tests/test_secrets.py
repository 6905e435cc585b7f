"""No message about an argument shows the password or the signature of a URL."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import aiofeed
from aiofeed.kernel.core.types import hides_secrets
from aiofeed.objects.urls import redacted

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
