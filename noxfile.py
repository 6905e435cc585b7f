"""The tests with other versions of Python and of the dependencies: ``pipx run nox -s tests-3.14t``.

Pytest's arguments follow ``--``. Where pip installs a CUDA build of PyTorch,
``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`` gives the much smaller one for CPUs.
"""

from __future__ import annotations

from pathlib import Path

import nox

# Optional packages that have no wheel for every Python; without one, its tests are skipped.
OPTIONAL = ("array-record", "av", "imagecodecs", "obstore", "pyarrow", "safetensors", "simplejpeg")

nox.options.sessions = ["tests"]


@nox.session(python=["3.11", "3.12", "3.13", "3.14", "3.14t"])
def tests(session: nox.Session) -> None:
    """The tests, with the newest version of each dependency."""
    session.install("--editable", ".[pillow,test]")
    for package in OPTIONAL:
        session.install("--only-binary", package, package, success_codes=[0, 1])
    run_tests(session)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """The tests, with the lowest version of each dependency that pyproject.toml allows."""
    extras = ".[pillow,turbo,objects,parquet,media,safetensors,prometheus,otel,test]"
    session.install("--constraint", "tests/install/lowest.txt", "--editable", extras)
    run_tests(session)


@nox.session(python="3.13")
def newest(session: nox.Session) -> None:
    """The tests, those with other projects too, with the newest version of every package."""
    session.install("--editable", ".[pillow,turbo,objects,array-record,litdata,test,integration]")
    run_tests(session)


@nox.session(python="3.12")
def lerobot(session: nox.Session) -> None:
    """The hashes of tests/data/lerobot beside LeRobot's items, and its speed beside that of the aiofeed in .venv.

    LeRobot brings a CUDA build of PyTorch, and torchcodec needs the shared libraries of FFmpeg.
    """
    session.install("lerobot[dataset]==0.6.1", "psutil")
    session.run("python", "tests/data/lerobot/make.py", "--check", env={"HF_HUB_OFFLINE": "1"})
    environment = {"AIOFEED_LEROBOT_PYTHON": str(Path(session.virtualenv.bin, "python"))}
    benchmark = [".venv/bin/python", "-m", "benchmarks", *(session.posargs or ["episodes"])]
    session.run(*benchmark, env=environment, external=True)


def run_tests(session: nox.Session) -> None:
    """Run pytest in the environment of a session."""
    options = session.posargs or ["--numprocesses", "auto", "--dist", "worksteal", "-m", "not slow"]
    session.run("python", "-m", "pytest", *options, env={"CI": "true"})
