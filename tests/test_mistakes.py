"""Every mistake in ``tests/mistakes.py`` raises an error whose message shows the way out."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import aiofeed
from aiofeed.objects.requests import fault_of
from aiofeed.reports.commands.prepare import write_indexes
from tests.mistakes import message_of, mistakes, prepare, two

pytestmark = pytest.mark.integration
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
pytest.importorskip("av")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the code of the mistakes may use; the current folder has its files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mistakes"))
        patch.setenv("AIOFEED_CACHE", str(Path.cwd() / "cache"))
        found = prepare()
        yield found
        found["fed"].close()


def wrong_name(data: bytes) -> Any:
    return undefined_name  # type: ignore[name-defined]  # noqa: F821


def wrong_attribute(data: bytes) -> Any:
    return data.missing  # type: ignore[attr-defined]


def wrong_type(data: bytes) -> Any:
    return len(3)  # type: ignore[arg-type]


def wrong_import(data: bytes) -> Any:
    import missing_module  # type: ignore[import-not-found]

    return missing_module


class Broken:
    """A Dataset with a wrong name."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return wrong_name(b"")


@pytest.mark.parametrize(("code", "words"), [(code, words) for _, code, words in mistakes()])
def test_a_mistake_has_a_message_with_the_way_out(
    code: str, words: str, names: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The message has the words that a user needs: the argument, what is allowed, or what to write."""
    with caplog.at_level(logging.CRITICAL):
        message = message_of(code, names)
    assert message is not None, "no error"
    assert words in message


def test_there_are_two_hundred_mistakes() -> None:
    """Each once."""
    found = [code for _, code, _ in mistakes()]
    assert len(set(found)) == len(found) >= 200


@pytest.mark.parametrize(
    ("decode", "engine"),
    [
        *[(decode, "thread") for decode in (wrong_name, wrong_attribute, wrong_type, wrong_import, Image.open)],
        pytest.param(wrong_type, "process", marks=pytest.mark.slow),
    ],
)
def test_no_advice_to_skip_samples_for_errors_of_code(
    decode: Any, engine: str, names: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor with on_error="skip" to allow more failures; errors of data have the advice."""
    names = names | {"decode": decode, "engine": engine}
    with caplog.at_level(logging.CRITICAL):
        message = message_of("list(Feeder(folder, decode=decode, batch_size=2, engine=engine))", names)
        skipped = "list(Feeder(folder, decode=decode, batch_size=2, engine=engine, on_error='skip'))"
        assert "decode 'train/a/0.png'" in str(message)
        assert "on_error" not in str(message)
        if decode is not Image.open and engine == "thread":
            assert "max_failures=0.01 allows" in str(message := message_of(skipped, names))
            assert "on_error" not in str(message)


@pytest.mark.parametrize(
    "way", ["Feeder(Broken(), batch_size=2)", "Feeder(Files(['train']), decode=image, batch_size=1)"]
)
def test_no_advice_to_skip_samples_for_errors_of_a_dataset_or_a_list(way: str, names: dict[str, Any]) -> None:
    """A Dataset with a wrong name, and a folder among files."""
    names = names | {"Broken": Broken}
    assert "on_error" not in str(message_of(f"list({way})", names))
    assert "on_error" in str(message_of("list(Feeder(Files(['text.png']), decode=image, batch_size=1))", names))


def test_functions_whose_signature_fits_or_is_not_known() -> None:
    """Builtins, partial functions, wrappers and functions with defaults pass."""

    @functools.wraps(two)
    def wrapper(data: bytes) -> int:
        return int(two(data, 0) != b"")

    partial = functools.partial(two, label=3)
    decoders: list[Any] = [len, hash, np.asarray, partial, wrapper, lambda *data: 1, lambda data, size=3: 1, str.split]
    for decode in [*decoders, lambda data, rng: 1]:
        aiofeed.Feeder(aiofeed.Files([__file__]), decode=decode, batch_size=1).close()


@pytest.mark.slow
def test_a_decoder_that_workers_cannot_see(tmp_path: Path) -> None:
    """A function defined under the guard of the script: the error says to define it above."""
    script = tmp_path / "script.py"
    script.write_text(
        'import aiofeed\nif __name__ == "__main__":\n    def decode(data): return len(data)\n'
        '    print(list(aiofeed.Feeder(aiofeed.Files([__file__]), decode=decode, batch_size=1, engine="process")))\n'
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert 'define it above `if __name__ == "__main__":`' in ended.stderr


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("Server returned non-2xx status code: 403 Forbidden", True),
        ("HTTP error: error sending request: http://169.254.169.254/latest/api/token", True),
        ("HTTP error: error sending request: http://127.0.0.1:1/bucket", False),
    ],
)
def test_missing_credentials_of_s3(text: str, way: bool) -> None:
    """The error names the variables, and the option for public data; obstore's reason stays."""
    message = str(fault_of(OSError(text), str, "s3://bucket/a").error)
    assert text[:20] in message
    assert ("AWS_ACCESS_KEY_ID" in message and "skip_signature" in message) is way
    assert "AWS" not in str(fault_of(OSError(text), str, "gs://bucket/a").error)


def test_an_index_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`aiofeed index FOLDER` says what to write, without a traceback."""
    assert write_indexes([str(tmp_path)], target=None, output=None) == 1
    assert f"{tmp_path}/* are the files in it" in capsys.readouterr().err


def test_lightning_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package to install."""
    for name in ("aiofeed.lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None if "aiofeed" not in name else sys.modules.get(name))
    monkeypatch.delitem(sys.modules, "aiofeed.lightning")
    with pytest.raises(ImportError, match="pip install lightning"):
        __import__("aiofeed.lightning")
