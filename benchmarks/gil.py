"""How many samples can one process decode at most, on a machine with any number of cores?

As many as the GIL lets it: a million microseconds, divided by those for which a sample holds the GIL. Each decoder runs
alone in one thread, while another process reads this process's GIL flag in its memory. The share of reads that find the
GIL held, times the thread's CPU time per sample, is what a sample holds; the time that threads lose in exchanging the
GIL is not in it. For Linux, and an interpreter with a GIL. "aiofeed itself" is a feeder with a decoder that sleeps.

Target: aiofeed itself holds the GIL for at most 5 us an image.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import os
import select
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.data import files_below, jpeg_folder
from benchmarks.figures import Figure, at_most
from benchmarks.harness import Contender, Measure, Settings, interleave

TITLE = "GIL per sample, and the most that a process can decode"

CHUNK, STATE_BYTES, PHASES, SPIN_S = 16, 1 << 20, 6, 60.0
ITSELF = "aiofeed itself"
JPEGS = {"64x64": (64, 64, 64, 2000), "500x400 to 224": (500, 400, 224, 256), "3000x2000 to 224": (3000, 2000, 224, 16)}
BACKENDS = {"native": "aiofeed's library", "turbo": "simplejpeg", "pillow": "Pillow", "lines": "usual lines of Pillow"}
RECORDS = ("DecodeNumpy, 150 KB", "DecodeTensor, 150 KB", "DecodeJSON, 1 KB", "text, 1 KB", "tokens, windows of 1,024")
SOUND = "DecodeAudio, 1 s of WAV"


def run(settings: Settings) -> list[Figure]:
    base = {"least_s": 0.02 if settings.quick else 0.4}
    contenders = [Contender(ITSELF, itself, base)]
    for name, (width, height, side, count) in JPEGS.items():
        options = {
            "folder": str(jpeg_folder(settings.data, settings.size(count, 16), width, height)),
            "side": side,
            **base,
        }
        contenders += [
            Contender(f"{name}, {library}", images, {**options, "backend": backend})
            for backend, library in BACKENDS.items()
            if backend != "turbo" or find_spec("simplejpeg")
        ]
    names = (*RECORDS, SOUND) if find_spec("av") else RECORDS
    contenders += [Contender(name, records, {"name": name, "folder": str(settings.data), **base}) for name in names]
    figures = []
    for contender in contenders:
        race = interleave([contender], settings)
        target = at_most(5) if contender.label == ITSELF else None
        figures.append(Figure(f"GIL: {contender.label}", race.column(contender.label, "held_us"), "us", target))
        figures.append(Figure(f"CPU: {contender.label}", race.column(contender.label, "cpu_us"), "us"))
    return figures


def images(folder: str, side: int, backend: Any, least_s: float) -> Any:
    import numpy as np

    import aiofeed

    files = [Path(path).read_bytes() for path in files_below(folder)]
    if backend == "lines":
        return held_by(usual_lines(side), files, least_s)
    decode = aiofeed.DecodeImage(side, backend=backend)
    out = np.empty((CHUNK, *decode.row.shape), np.uint8)
    return held_by(lambda data: decode.decode_many_into(data, out[: len(data)], None), files, least_s)


def usual_lines(side: int) -> Callable[[Sequence[bytes]], object]:
    """What a ``Dataset`` does, and ``default_collate``."""
    import numpy as np
    import torch
    from PIL import Image

    torch.set_num_threads(1)  # or the time of its other threads would count

    def one(data: bytes) -> torch.Tensor:
        image = Image.open(io.BytesIO(data)).convert("RGB")
        if image.size != (side, side):
            image = image.resize((side, side), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()

    return lambda data: torch.stack([one(each) for each in data])


def records(name: str, folder: str, least_s: float) -> Any:
    import numpy as np

    import aiofeed

    if name.startswith("tokens"):
        path = Path(folder) / "gil-tokens.bin"
        np.random.default_rng(0).integers(1 << 15, size=1 << 22).astype(np.uint16).tofile(path)
        tokens: Any = aiofeed.Tokens(str(path), 1024)
        out = np.empty((CHUNK, *tokens.decoder.row.shape), np.int64)
        order = np.random.default_rng(0).permutation(len(tokens)).tolist()
        return held_by(
            lambda indices: tokens.decoder.decode_many_into(indices, out[: len(indices)], None), order, least_s
        )
    array = np.random.default_rng(0).integers(256, size=(224, 224, 3)).astype(np.uint8)
    file = io.BytesIO()
    decode: Any
    if name == SOUND:
        decode = aiofeed.DecodeAudio(16_000, 1.0, crop="first")
        with wave.open(file, "wb") as sound:
            sound.setparams((1, 2, 16_000, 0, "NONE", ""))
            sound.writeframes(array.tobytes()[:32_000])
    elif name.startswith("DecodeNumpy"):
        decode = aiofeed.DecodeNumpy()
        np.save(file, array)
    elif name.startswith("DecodeTensor"):
        import torch
        from safetensors.torch import save

        decode = aiofeed.DecodeTensor("x")
        file.write(save({"x": torch.from_numpy(array)}))
    else:
        decode = aiofeed.DecodeJSON() if name.startswith("DecodeJSON") else bytes.decode
        file.write(json.dumps({f"field {number}": number / 7 for number in range(32)}).encode())
    return held_by(lambda data: [decode(each) for each in data], [file.getvalue()] * CHUNK, least_s)


@contextmanager
def held_by(decode: Callable[[Any], object], samples: Sequence[Any], least_s: float) -> Iterator[Measure]:
    """Measures chunk after chunk in this thread."""

    def work() -> int:
        count, until = 0, time.perf_counter() + least_s
        while count < CHUNK or time.perf_counter() < until:
            start = count % max(len(samples) - CHUNK + 1, 1)
            decode(samples[start : start + CHUNK])
            count += CHUNK
        return count

    work()
    with GilFlag() as flag:
        yield lambda: held(flag, work)


@contextmanager
def itself(least_s: float) -> Iterator[Measure]:
    from benchmarks import simulated

    class Short(simulated.Chunks):
        def decode_many_into(self, data: Sequence[object], out: object, seeds: object = None) -> list[None]:
            simulated.usleep(50 * len(data))
            return [None] * len(data)

    import aiofeed

    limits = aiofeed.Limits(decode_threads=2)
    flag = GilFlag()
    with flag, aiofeed.Feeder(simulated.Ready(), decode=Short("chunks"), batch_size=64, limits=limits) as feeder:
        batches = iter(feeder)
        simulated.run(batches, math.inf, least_s)
        yield lambda: held(flag, lambda: simulated.run(batches, math.inf, least_s), alone=False)


def held(flag: GilFlag, work: Callable[[], int], alone: bool = True) -> Mapping[str, float]:
    flag.start()
    wall, cpu = time.perf_counter(), time.process_time()
    items = work()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    # A thread alone holds the GIL, or does not, also while it waits for a core: the share is that of its CPU time.
    busy_s = cpu_s if alone else wall_s
    return {"items": items, "held_us": flag.stop() * busy_s / items * 1e6, "cpu_us": cpu_s / items * 1e6}


class GilFlag:
    """Another process that reads whether this one's GIL is held. To be made while this is the only thread."""

    def __init__(self) -> None:
        address = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
        ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # PR_SET_PTRACER: any process may read this one's memory
        # 1 while this process runs Python without a pause; the other one sets it to 0. So neither has to be in time.
        spins = ctypes.c_int32(0)
        command = [sys.executable, "-m", "benchmarks.gil", *map(str, (os.getpid(), address, ctypes.addressof(spins)))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            for phase in range(PHASES):
                if not phase % 2:
                    self._answer()
                    continue
                spins.value, until = 1, time.perf_counter() + SPIN_S
                while spins.value and time.perf_counter() < until:
                    pass
            if not int(self._answer()):
                raise RuntimeError("no flag of the GIL was found in the interpreter's state")
        except BaseException:
            self._process.kill()
            self.__exit__()
            raise

    def start(self) -> None:
        self._send("start")
        self._answer()

    def stop(self) -> float:
        """The share of the time since ``start`` in which the GIL was held."""
        self._send("stop")
        return float(self._answer())

    def _send(self, line: str) -> None:
        print(line, file=self._process.stdin, flush=True)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __enter__(self) -> GilFlag:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


def watch(pid: int, address: int, spins: int) -> None:
    """Find the flag in the process's memory, and count the reads that find it set, on request."""
    import numpy as np

    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    states: list[list[Any]] = [[], []]
    for phase in range(PHASES):
        busy = phase % 2 == 1
        while not (any(os.pread(memory, 4, spins)) if busy else sleeps(pid)):
            time.sleep(0.001)
        for _ in range(5):
            states[busy].append(np.frombuffer(os.pread(memory, STATE_BYTES, address), np.int32))
        if busy:
            os.pwrite(memory, bytes(4), spins)
        else:
            print("seen", flush=True)
    size = min(len(each) for each in states[0] + states[1])
    idle, busy = (np.stack([each[:size] for each in part]) for part in states)
    found = np.flatnonzero((idle == 0).all(0) & (busy == 1).all(0))
    print(len(found), flush=True)
    at = address + 4 * int(found[0])
    while sys.stdin.readline():
        print("started", flush=True)
        reads = held = 0
        while not reads or not select.select([sys.stdin], [], [], 0)[0]:
            for _ in range(200):
                held += os.pread(memory, 1, at) != b"\0"
            reads += 200
        sys.stdin.readline()
        print(held / reads, flush=True)


def sleeps(pid: int) -> bool:
    """Return whether the first thread of a process waits, here for an answer, and so has released the GIL."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


if __name__ == "__main__":
    watch(*map(int, sys.argv[1:4]))
