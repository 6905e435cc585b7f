"""``DecodeImage``: the bytes of one image file to uint8 RGB of a fixed size, by Pillow or Pillow-SIMD.

Two steps, kept apart so that something may stand between them: ``load_picture`` (deterministic: bytes to an upright RGB
picture) and ``render`` (what a ``View``, drawn from the sample's seed, shows of it). Where there is something faster
for plain JPEGs, it is asked first (``backends``). Torch is imported by ``__call__`` alone.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import PIL

from aiofeed.core.random_numbers import SplitMix64
from aiofeed.core.types import Row, public
from aiofeed.decoders.backends import JpegDispatch
from aiofeed.decoders.cached_picture import keep, larger_bytes, show
from aiofeed.decoders.geometry import Box, View, center_box, random_box
from aiofeed.decoders.pillow import FORMATS, known_formats, render

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Whichever was installed last serves, and many packages pull Pillow in: say which one it is.
_log = logging.getLogger("aiofeed.decoders")
_log.info("images are decoded by %s %s", "Pillow-SIMD" if ".post" in PIL.__version__ else "Pillow", PIL.__version__)


@public
@dataclass(frozen=True)
class DecodeImage:
    """Decode the bytes of one image file, of any mode that Pillow reads, to uint8 RGB, [3, H, W].

    EXIF orientation is honoured, alpha dropped, the first frame taken; 16 bits become 8 by their high byte. The filter
    is Pillow's antialiased bilinear. With a pair as ``size`` and ``scaled=False`` the result equals
    ``exif_transpose``, ``convert("RGB")``, ``resize((W, H), BILINEAR)`` bit for bit, for all modes of 8 bits. Crops
    are boxes of one resize: at their border the filter sees the pixels just outside, where torchvision's
    ``RandomResizedCrop`` cuts first. Safe to call from several threads at once.

    A damaged file is decoded as Pillow decodes it, or is an error; what Pillow warns and logs about it is dropped. A
    truncated one is an error, unless the program has set Pillow's own ``ImageFile.LOAD_TRUNCATED_IMAGES``, which
    is obeyed, and told to the log.

    Args:
        size: a pair is exactly (height, width), aspect not kept; an int gives size x size.
        resize: the shorter side before the centre crop, in pixels, ``size`` or more; ``None``: ``size``.
        crop: "center" (torchvision's ``Resize`` and ``CenterCrop``; a pair is not cropped) or "random" (its
            ``RandomResizedCrop``).
        scale: bounds of a random crop's share of the area.
        ratio: bounds of a random crop's width / height.
        flip: mirror left to right, every second sample by its seed.
        scaled: decode a JPEG at 1/2, 1/4 or 1/8 where what is shown of it stays at least twice the target on both axes,
            and by what is faster than it is exact (see ``backend``).
        max_pixels: limit on width x height, checked in the header before memory is taken. The default is where
            Pillow's own ``Image.open`` refuses; a larger one may be given. A progressive JPEG may have 16 scans of as
            many pixels. (Pictures inside ICO, ICNS and BLP files, which have headers of their own, also keep to
            Pillow's.)
        formats: which formats may be opened, by Pillow's names, in any case. The default is what people train on:
            JPEG (with MPO, of which the first picture counts), PNG, WEBP, GIF, BMP, TIFF, PPM (with PGM, PBM and PFM),
            AVIF and JPEG2000, as far as this Pillow has them. More can be asked for, ``(*DecodeImage.formats,
            "TGA")``; mind that for "EPS" Pillow runs Ghostscript, a PostScript interpreter, on whatever the file says.
        backend: who decodes a plain JPEG (sequential, 8 bits, grey or YCbCr, undamaged); all else is Pillow's always.
            "auto": with ``scaled``, the library that is built with aiofeed where a compiler and libjpeg-turbo's headers
            are: whole chunks without the interpreter's lock, no more rows than are shown, on photographs at least
            45 dB PSNR from Pillow's pixels. Without it, or with ``scaled=False``: simplejpeg for at most 2**17 pixels
            where it is installed (the extra ``turbo``), else Pillow. "native": that library; an error where there
            is none. "turbo": simplejpeg for any size; an error where it is not installed. "pillow": Pillow. The
            pixels of the last two are the same, bit for bit, where Pillow too has libjpeg-turbo, as its wheels do.
        cached_size: with ``crop="random"`` and a feeder's ``cache=``: (height, width) of the picture that is kept, or
            an int for both; the whole picture, aspect not kept. Crops are taken from it, in the proportions that they
            would have in the file. ``None``: five quarters of ``size``. Without a random crop exactly the result is
            kept, unmirrored.

    Raises:
        TypeError: what is decoded is not bytes.
        ValueError, OSError: it is no image, of another format, broken, truncated, of no pixels or of more than
            ``max_pixels``.
        ImportError: ``backend="turbo"`` without simplejpeg, ``backend="native"`` without that library.
    """

    size: int | tuple[int, int]
    resize: int | None = field(default=None, kw_only=True)
    crop: Literal["center", "random"] = field(default="center", kw_only=True)
    scale: tuple[float, float] = field(default=(0.08, 1.0), kw_only=True)
    ratio: tuple[float, float] = field(default=(3 / 4, 4 / 3), kw_only=True)
    flip: bool = field(default=False, kw_only=True)
    scaled: bool = field(default=True, kw_only=True)
    max_pixels: int = field(default=178_956_970, kw_only=True)
    formats: tuple[str, ...] = field(default=FORMATS, kw_only=True)
    backend: Literal["auto", "native", "pillow", "turbo"] = field(default="auto", kw_only=True)
    cached_size: int | tuple[int, int] | None = field(default=None, kw_only=True)

    row: Row = field(init=False, repr=False, compare=False)
    takes_seed: bool = field(init=False, repr=False, compare=False)
    cached_row: Row = field(init=False, repr=False, compare=False)
    _backends: JpegDispatch = field(init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        said = [field for field in fields(self) if field.repr and getattr(self, field.name) != field.default]
        return f"{type(self).__name__}({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in said)})"

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "size", size_of(self.size))
        height, width = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        if self.crop not in ("center", "random"):
            raise ValueError(f'crop must be "center" or "random", got {self.crop!r}')
        if self.resize is not None:
            put(self, "resize", positive("resize", self.resize))
            if isinstance(self.size, tuple) or self.crop == "random":
                given = f"size={self.size!r}" if isinstance(self.size, tuple) else 'crop="random"'
                raise ValueError(f'resize={self.resize} is for an int size with crop="center", not for {given}')
            if self.resize < self.size:
                raise ValueError(f"resize must be size={self.size} or more, got {self.resize}")
        put(self, "scale", bounds("scale", self.scale, highest=1.0))
        put(self, "ratio", bounds("ratio", self.ratio, highest=math.inf))
        for name in ("flip", "scaled"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        put(self, "max_pixels", positive("max_pixels", self.max_pixels))
        put(self, "formats", names_of(self.formats))
        put(self, "_backends", JpegDispatch(self.backend, self.scaled, self.max_pixels, self.formats))
        put(self, "row", Row((height, width, 3), "uint8", (2, 0, 1)))
        put(self, "takes_seed", self.crop == "random" or self.flip)
        put(self, "cached_row", self.row)
        if self.cached_size is not None:
            put(self, "cached_size", size_of(self.cached_size, "cached_size"))
        if self.crop == "random":
            put(self, "cached_row", Row((larger_bytes(*self._kept_size),), "uint8"))
        elif self.cached_size is not None:
            raise ValueError(f'cached_size={self.cached_size!r} is for crop="random"; without it the result is kept')

    def __call__(self, data: bytes, /, *, rng: torch.Generator | None = None) -> torch.Tensor:
        """Decode to a uint8 CPU tensor, [3, H, W] over [H, W, 3] memory; ``rng`` gives the seed where one is taken."""
        import torch

        seed = None
        if self.takes_seed:
            if rng is None:
                raise ValueError(f"{self!r} is random: it needs rng, a torch.Generator")
            seed = int(torch.randint(2**63 - 1, (), generator=rng, device="cpu"))
        out = np.empty(self.row.shape, np.uint8)
        self.decode_into(data, out, seed)
        return torch.from_numpy(out).permute(2, 0, 1)

    def decode_into(self, data: bytes, out: NDArray[np.uint8], seed: int | None = None) -> None:
        """Decode into ``out``, C-contiguous uint8 [H, W, 3]; nothing is written unless all went well.

        Args:
            data: the bytes of one image file; anything with a buffer.
            seed: an integer, 64 bits of it count; needed where ``takes_seed``, else without effect.
        """
        check_memory(out, self.row)
        self._backends.decode(as_bytes(data), out, lambda width, height: self.view(width, height, seed))

    def decode_many_into(
        self, data: Sequence[bytes], out: NDArray[np.uint8], seeds: Sequence[int] | None = None
    ) -> list[Exception | None]:
        """Decode several files into ``out``, uint8 [N, H, W, 3], each as ``decode_into`` would; at once if it can.

        Args:
            data: N of what that takes.
            out: every row of it C-contiguous.
            seeds: one for each; needed where ``takes_seed``.

        Returns:
            The error of each, ``None`` where there is none. Their rows are as they were.
        """
        count = len(data)
        if out.ndim != 4 or len(out) != count:
            raise ValueError(f"out must be uint8 {[count, *self.row.shape]}, got {out.dtype} {list(out.shape)}")
        if count:
            check_memory(out[0], self.row)
        if seeds is not None and len(seeds) != count:
            raise ValueError(f"seeds must be as many as data, {count}, got {len(seeds)}")
        errors: list[Exception | None] = [None] * count
        files = list(data)
        for at, file in enumerate(files):
            if type(file) is not bytes:
                try:
                    files[at] = as_bytes(file)
                except TypeError as error:
                    files[at], errors[at] = b"", error

        fixed = functools.cache(self.view)  # pictures of one data set are often of a few sizes

        def choose(at: int, width: int, height: int) -> View:
            if not self.takes_seed:
                return fixed(width, height)
            return self.view(width, height, None if seeds is None else seeds[at])

        self._backends.decode_many(files, out, choose, errors)
        return errors

    @property
    def _kept_size(self) -> tuple[int, int]:
        if self.cached_size is None:
            height, width, _ = self.row.shape
            return -(-height * 5 // 4), -(-width * 5 // 4)
        return self.cached_size if isinstance(self.cached_size, tuple) else (self.cached_size, self.cached_size)

    def decode_cached_into(self, data: bytes, out: NDArray[np.uint8]) -> None:
        """Decode into ``out``, of ``cached_row``, all that does not depend on a seed: what a cache keeps."""
        check_memory(out, self.cached_row)
        data = as_bytes(data)
        if self.crop != "random":
            self._backends.decode(data, out, lambda width, height: View(self._fixed_box(width, height)))
            return
        original = (0, 0)

        def choose(width: int, height: int) -> View:
            nonlocal original
            original = width, height
            return View((0, 0, width, height))

        height, width = self._kept_size
        picture, view = self._backends.load(data, choose, (width, height))
        pixels = np.empty((height, width, 3), np.uint8)
        render(picture, view, pixels)
        keep(pixels, original, out)

    def augment_into(self, cached: NDArray[np.uint8], out: NDArray[np.uint8], seed: int | None = None) -> None:
        """Fill ``out``, of ``row``, with what ``seed`` shows of a kept picture."""
        if self.crop == "random":
            picture, view = show(cached, self._kept_size, lambda width, height: self.view(width, height, seed), out)
            render(picture, view, out)
            return
        height, width, _ = self.row.shape
        if self.takes_seed and self.view(width, height, seed).flip:
            for channel in range(3):  # numpy turns single bytes faster than threes of them
                out[:, :, channel] = cached[:, ::-1, channel]
        else:
            out[...] = cached

    def fingerprint(self) -> str:
        """What tells this decoder's kept pictures from others': the settings that show in them, and the Pillow."""
        if self.crop == "random":
            form = f"whole pictures of {list(self._kept_size)}"
        else:
            form = f"size={self.size}, resize={self.resize}"
        which = f"{'Pillow-SIMD' if '.post' in PIL.__version__ else 'Pillow'} {PIL.__version__}"
        library = None if self.crop == "random" else self._backends.library()
        if library is not None:
            which += f", libjpeg-turbo {library.version} by itself"
        rules = f"scaled={self.scaled}, max_pixels={self.max_pixels}, formats={','.join(self.formats)}"
        return f"{type(self).__name__}: {form}, {rules}, {which}"

    def view(self, width: int, height: int, seed: int | None = None) -> View:
        """What this decoder shows of an upright picture of width x height pixels. Pure."""
        if not self.takes_seed:
            return View(self._fixed_box(width, height))
        if seed is None:
            raise ValueError(f"{self!r} is random: it needs a seed")
        numbers = SplitMix64(seed)
        # Drawn first and always, so that the crops of a seed are the same with and without flips.
        mirrored = numbers.random() < 0.5
        if self.crop == "random":
            box = random_box(width, height, self.scale, self.ratio, numbers)
        else:
            box = self._fixed_box(width, height)
        return View(box, self.flip and mirrored)

    def _fixed_box(self, width: int, height: int) -> Box:
        if isinstance(self.size, tuple):
            return 0, 0, width, height
        return center_box(width, height, self.size, self.resize or self.size)


def positive(name: str, value: object) -> int:
    """An int of 1 or more."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if number < 1:
        raise ValueError(f"{name} must be 1 or more, got {number}")
    return number


def size_of(size: Any, name: str = "size") -> int | tuple[int, int]:
    """A side, or a pair of them as a tuple."""
    if isinstance(size, (tuple, list)):
        if len(size) != 2:
            raise ValueError(f"{name} must be an int or a pair (height, width), got {size!r}")
        return positive(f"height in {name}", size[0]), positive(f"width in {name}", size[1])
    return positive(name, size)


def bounds(name: str, value: Any, *, highest: float) -> tuple[float, float]:
    """A pair of finite numbers above 0, in order."""
    allowed = f"0 < low <= high{' <= 1' if highest == 1.0 else ''}"
    try:
        low, high = (float(bound) for bound in value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a pair (low, high) of numbers with {allowed}, got {value!r}") from None
    if not (0 < low <= high <= highest and math.isfinite(high)):
        raise ValueError(f"{name} must be a pair (low, high) with {allowed}, got {value!r}")
    return low, high


def names_of(formats: Any) -> tuple[str, ...]:
    """Names of formats in upper case, each once."""
    if isinstance(formats, str) or not isinstance(formats, Iterable):
        raise TypeError(f"formats must be a tuple of names, as {FORMATS!r}, got {formats!r}")
    formats = tuple(formats)
    if not all(isinstance(name, str) for name in formats):
        raise TypeError(f"formats must be a tuple of names, as {FORMATS!r}, got {formats!r}")
    names = tuple(dict.fromkeys(name.upper() for name in formats))
    if not names:
        raise ValueError("formats must name one format or more, got none")
    # Plugins are loaded only to look for other names: the usual ones need no look, whether this Pillow has them or not.
    if not set(names) <= set(FORMATS) and (unknown := set(names) - known_formats()):
        known = ", ".join(sorted(known_formats()))
        raise ValueError(f"formats has {min(unknown)!r}, which this Pillow cannot open; it knows {known}")
    return names


def check_memory(out: NDArray[np.uint8], row: Row) -> None:
    """Memory that a row can be written to: C-contiguous uint8 of its shape."""
    if out.shape != row.shape or out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"out must be writable C-contiguous uint8 {list(row.shape)}, "
            f"got {out.dtype} {list(out.shape)} with strides {out.strides}, writable={out.flags.writeable}"
        )


def as_bytes(data: object) -> bytes:
    """The bytes of anything with a buffer."""
    if isinstance(data, bytes):
        return data
    try:
        return bytes(memoryview(data))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"DecodeImage takes the bytes of one image, got {type(data).__name__}; where a sample is of several files, "
            "decode= takes a callable of your own, which may hand the image's bytes to a DecodeImage"
        ) from None
