"""Measures the first use of aiofeed: ``python tests/install/first_batch.py dist/aiofeed-0.1.0-py3-none-any.whl``.

Makes a fresh environment, installs aiofeed with Pillow, writes a folder of images and loads the first batch of it.
Prints the seconds of each step and exits with 1 if together they exceed the limit. ``PIP_NO_CACHE_DIR=1`` includes the
downloads. Uses the standard library only.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEP_TIMEOUT_S = 1200

IMAGES = """
import os
from PIL import Image

for name in ("cat", "dog"):
    os.makedirs(f"train/{name}")
    for number in range(64):
        Image.effect_noise((256, 256), 80).convert("RGB").save(f"train/{name}/{number}.jpg")
"""

FIRST_BATCH = """
import sys
import aiofeed

decode = aiofeed.DecodeImage(size=224, backend=sys.argv[1])
feeder = aiofeed.Feeder(aiofeed.ImageFolder("train/"), decode=decode, batch_size=64, shuffle=True, seed=0)
for images, labels in feeder:
    assert images.shape == (64, 3, 224, 224)
    break
"""


def main() -> None:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="a wheel, a checkout, or a name that pip finds")
    parser.add_argument("--constraint", metavar="FILE", help="constraints for pip")
    parser.add_argument("--limit-s", type=float, default=120, help="most seconds of all steps (%(default)s)")
    parser.add_argument(
        "--without-compiler", action="store_true", help="no program on the path; fails without the native libraries"
    )
    arguments = parser.parse_args()
    path = Path(arguments.package)
    package = str(path.resolve()) if path.exists() else arguments.package

    with tempfile.TemporaryDirectory(prefix="aiofeed-install-") as folder:
        scripts = Path(folder, "venv", "Scripts" if os.name == "nt" else "bin")
        python = str(scripts / "python")
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        if arguments.without_compiler:
            env |= {"PATH": str(scripts), "CC": "no-compiler"}

        def run(step: str, *command: str) -> tuple[float, str]:
            start = time.perf_counter()
            done = subprocess.run(
                command, cwd=folder, env=env, timeout=STEP_TIMEOUT_S, stdout=subprocess.PIPE, text=True, check=False
            )
            seconds = time.perf_counter() - start
            if done.returncode:
                sys.exit(f"{step}: {shlex.join(command)} failed after {seconds:.1f} s")
            print(f"{step:<30} {seconds:7.1f} s", flush=True)
            return seconds, done.stdout

        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if arguments.constraint:
            pip += ["--constraint", str(Path(arguments.constraint).resolve())]
        backend = "native" if arguments.without_compiler else "auto"
        steps = [
            run("make an environment", sys.executable, "-m", "venv", str(scripts.parent)),
            run("pip install torch", *pip, "torch"),
            run("pip install aiofeed[pillow]", *pip, f"{package}[pillow]"),
            run("write 128 images", python, "-c", IMAGES),
            run("import and first batch", python, "-c", FIRST_BATCH, backend),
        ]
        total_s = sum(seconds for seconds, _ in steps)
        print(f"{'together':<30} {total_s:7.1f} s")
        _, report = run("(python -m aiofeed doctor)", python, "-m", "aiofeed", "doctor")

    print(report)
    if arguments.without_compiler and os.name == "posix" and "read in groups" not in report:
        sys.exit("the library for small files is missing")
    if total_s > arguments.limit_s:
        sys.exit(f"the steps took {total_s:.0f} s, more than {arguments.limit_s:g}")


if __name__ == "__main__":
    main()
