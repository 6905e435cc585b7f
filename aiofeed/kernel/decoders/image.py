"""``DecodeImage``: decodes the bytes of one image file to uint8 RGB of a fixed size.

Decoding has two steps: ``load_picture`` (deterministic: bytes to an upright RGB picture) and ``render`` (draws the
``View`` that the sample's seed selects). The native library or simplejpeg decode plain JPEGs, Pillow decodes everything
else. Only ``__call__`` imports torch.

The cached form of a random crop's picture has somewhat more pixels than a sample, and the size of the original.
"""

from __future__ import annotations

import functools
import logging
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import PIL

from aiofeed import _load_addon
from aiofeed.kernel.core.types import Row, public
from aiofeed.kernel.core.validation import check_bool, check_bytes, check_positive_int, explain_arguments
from aiofeed.kernel.decoders.geometry import FORMATS, Box, View, center_box, map_box, random_box
from aiofeed.kernel.decoders.native_jpeg import NativeDecoder, native_decoder, required_native_decoder
from aiofeed.kernel.sampling.order import SplitMix64, seed_from

# The module `pillow` is imported where it is needed: the native library decodes most files.

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from PIL import Image

# Pillow and Pillow-SIMD install the same package, and many packages install Pillow: log which one is in use.
_PILLOW = f"{'Pillow-SIMD' if '.post' in PIL.__version__ else 'Pillow'} {PIL.__version__}"
_log = logging.getLogger("aiofeed.decoders")
_log.info("images are decoded by %s", _PILLOW)

_ORIGINAL_SIZE = struct.Struct("<II")  # width and height, after the pixels of a cached picture


_NORMALISE = "images are uint8: normalise batches on the device, in transform= of Feeder"
_WAYS = {
    "mean": _NORMALISE,
    "std": _NORMALISE,
    "normalize": _NORMALISE,
    "dtype": _NORMALISE,
    "interpolation": "the filter is bilinear with antialiasing",
    "antialias": "the filter is bilinear with antialiasing",
    "transform": "pass it to Feeder, which calls it with each batch; or pass augment=, which changes single images",
}


@public
@explain_arguments(_WAYS, hint="; for height and width: DecodeImage((224, 224))")
@dataclass(frozen=True)
class DecodeImage:
    """Decode the bytes of one image file, of any mode that Pillow reads, to uint8 RGB, [3, H, W].

    Example:
        ```python
        import aiofeed

        train = aiofeed.DecodeImage(size=224, crop="random", flip=True)
        valid = aiofeed.DecodeImage(size=224, resize=256)
        feeder = aiofeed.Feeder(aiofeed.ImageFolder("photos"), decode=train, batch_size=4, shuffle=True)
        for images, labels in feeder:
            print(images.shape, images.dtype)
        ```

    Applies the EXIF orientation, drops alpha, and takes the first frame; 16-bit channels become 8-bit by their high
    byte. The filter is Pillow's antialiased bilinear. With a pair as ``size`` and ``scaled=False`` the result equals
    ``exif_transpose``, ``convert("RGB")``, ``resize((W, H), BILINEAR)`` bit for bit, for all 8-bit modes. A crop is
    the box of one resize: at its border the filter uses the pixels just outside, where torchvision's
    ``RandomResizedCrop`` cuts first. Safe to call from several threads at once.

    Decodes a damaged file as Pillow does, or raises; drops what Pillow warns and logs about it. A truncated file
    raises, unless the program sets Pillow's ``ImageFile.LOAD_TRUNCATED_IMAGES``, which is obeyed and logged once.

    Args:
        size: (height, width), aspect ratio not preserved; an int gives size x size. ``None``, with ``mode="keep"``: the
            size of the file.
        mode: "rgb", or "keep": all channels in the dtype of the file, [C, H, W], for depth maps, medical and satellite
            images: uint16, int32 and float32 as well as uint8, to which grey of less than 8 bits is scaled; of a TIFF
            its numbers, bool if they have one bit; indices of palettes. Resized with the same filter in that precision
            (palettes and bool: nearest). Samples are collated, so the files
            of a batch need one shape and dtype. Decoded by Pillow at full scale; files with values that Pillow does not
            read are refused: 16-bit colour, float64, AVIF, JPEG 2000. Not read in place, and not cached if random.
        resize: length of the shorter side before the centre crop, in pixels, at least ``size``. ``None``: ``size``.
        crop: "center" (torchvision's ``Resize`` and ``CenterCrop``; a pair as ``size`` is not cropped) or "random"
            (its ``RandomResizedCrop``).
        scale: lower and upper bound of a random crop's share of the area.
        ratio: lower and upper bound of a random crop's width / height.
        flip: mirror half of the samples left to right, chosen by their seeds.
        scaled: decode a JPEG at 1/2, 1/4 or 1/8 if the part that is shown stays at least twice the target on both
            axes, and allow backends whose pixels differ slightly from Pillow's (see ``backend``).
        max_pixels: limit on width x height, checked in the header before memory is allocated. The default is the limit
            of Pillow's own ``Image.open``; it may be raised. The scans of a progressive JPEG may cover 16 times as many
            pixels. (Pictures inside ICO, ICNS and BLP files have headers of their own and are subject to Pillow's
            limit too.)
        formats: formats that may be opened, by Pillow's names, in any case. The default is JPEG (and the first picture
            of an MPO), PNG, WEBP, GIF, BMP, TIFF, PPM (and PGM, PBM, PFM), AVIF and JPEG2000, as far as the installed
            Pillow supports them. Add more with ``(*DecodeImage.formats, "TGA")``. For "EPS" Pillow runs Ghostscript, a
            PostScript interpreter, on the file's contents.
        backend: decoder of plain JPEGs (sequential, 8 bits, grey or YCbCr, undamaged); Pillow decodes everything else.
            "auto": with ``scaled``, aiofeed's native library, which most wheels contain, and which is otherwise built
            with a compiler and libjpeg-turbo's headers: it decodes whole chunks without the GIL, no more rows than are
            shown, and on photographs differs from Pillow's pixels by at least 45 dB PSNR. Without the library, or with
            ``scaled=False``: simplejpeg for at most 2**17 pixels if it is installed (the extra ``turbo``), else Pillow.
            "native": the native library. "turbo": simplejpeg for any size. "pillow": Pillow. The pixels of the last
            two are identical if Pillow uses libjpeg-turbo too, as its wheels do. With imagecodecs (the extra ``png``),
            plain PNGs are decoded by libpng, unless it is "pillow"; the pixels are Pillow's.
        cached_size: with ``crop="random"`` and a feeder's ``cache=``: (height, width) of the cached picture, or an int
            for both; the whole picture, aspect ratio not preserved. Crops are taken from it in the proportions that
            they have in the file. ``None``: five quarters of ``size``. Without a random crop the cache stores the
            result itself, not mirrored.
        augment: changes each image after crop and flip, with the sample's random numbers: a transform of torchvision's
            v2 or of albumentations 2, or a callable that gets a uint8 tensor [3, H, W], and the sample's generator if
            it has a keyword ``rng``. It returns the same shape and dtype.

    Raises:
        TypeError: the data is not bytes; ``augment`` cannot have the sample's random numbers.
        ValueError, OSError: the data is not an image, or of another format, damaged, truncated, without pixels or of
            more than ``max_pixels``.
        ImportError: ``backend="turbo"`` without simplejpeg, ``backend="native"`` without the native library.
    """

    size: int | tuple[int, int] | None
    mode: Literal["rgb", "keep"] = field(default="rgb", kw_only=True)
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
    augment: Callable[..., Any] | None = field(default=None, kw_only=True)

    row: Row = field(init=False, repr=False, compare=False)
    takes_seed: bool = field(init=False, repr=False, compare=False)
    cached_row: Row = field(init=False, repr=False, compare=False)
    _augment_row: Callable[[NDArray[np.uint8], int], None] | None = field(init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        changed = [field for field in fields(self) if field.repr and getattr(self, field.name) != field.default]
        return f"{type(self).__name__}({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in changed)})"

    def __post_init__(self) -> None:
        assign = object.__setattr__
        if self.mode not in ("rgb", "keep"):
            raise ValueError(f'mode must be "rgb" or "keep", got {self.mode!r}')
        if self.mode == "keep":
            _load_addon("check_kept", 'mode="keep"')(self)
        if self.size is None and self.mode == "rgb":
            raise TypeError('DecodeImage(size=None) keeps the size of each file: pass mode="keep", or a size')
        if self.size is not None:
            assign(self, "size", _parse_size("size", self.size))
        if self.crop not in ("center", "random"):
            raise ValueError(f'crop must be "center" or "random", got {self.crop!r}')
        if self.resize is not None:
            assign(self, "resize", check_positive_int("resize", self.resize))
            if not isinstance(self.size, int) or self.crop == "random":
                given = 'crop="random"' if isinstance(self.size, int) else f"size={self.size!r}"
                raise ValueError(f'resize={self.resize} needs an int size and crop="center", got {given}')
            if self.resize < self.size:
                raise ValueError(f"resize must be at least size={self.size}, got {self.resize}")
        assign(self, "scale", _parse_range("scale", self.scale, highest=1.0))
        assign(self, "ratio", _parse_range("ratio", self.ratio, highest=math.inf))
        for name in ("flip", "scaled"):
            check_bool(name, getattr(self, name))
        assign(self, "max_pixels", check_positive_int("max_pixels", self.max_pixels))
        assign(self, "formats", _parse_formats(self.formats))
        if self.backend not in ("auto", "native", "pillow", "turbo"):
            raise ValueError(f'backend must be "auto", "native", "pillow" or "turbo", got {self.backend!r}')
        if self.backend == "native" and not self.scaled:
            raise ValueError('backend="native" is not exact, so it needs scaled=True; scaled=False is for exact pixels')
        if self.backend == "turbo":
            _load_addon("required_simplejpeg_decoder", 'backend="turbo"')()
        elif self.backend == "native":
            required_native_decoder()
        assign(self, "takes_seed", self.crop == "random" or self.flip or self.augment is not None)
        assign(self, "_augment_row", None)
        if self.mode == "keep":
            return  # without a row it is a decoder that returns its samples
        if self.augment is not None:
            augmentation = _load_addon("Augmentation", "augment=")  # imports torch
            assign(self, "_augment_row", augmentation(self.augment, alone=True).augment_row)
        assign(self, "row", Row((*self._shape, 3), "uint8", (2, 0, 1)))
        assign(self, "cached_row", self.row)
        if self.cached_size is not None:
            assign(self, "cached_size", _parse_size("cached_size", self.cached_size))
        if self.crop == "random":
            cached_height, cached_width = self._cached_shape
            assign(self, "cached_row", Row((cached_height * cached_width * 3 + _ORIGINAL_SIZE.size,), "uint8"))
        elif self.cached_size is not None:
            raise ValueError(f'cached_size={self.cached_size!r} needs crop="random"; without it the result is cached')

    def __call__(self, data: bytes, /, *, rng: torch.Generator | None = None) -> torch.Tensor:
        """Decode to a uint8 CPU tensor, [3, H, W] over [H, W, 3] memory; ``rng`` gives a random decoder its seed."""
        import torch

        seed = seed_from(rng, self) if self.takes_seed else None
        if self.mode == "keep":
            size = None if self.size is None else self._shape[::-1]
            decode_kept = _load_addon("decode_kept", 'mode="keep"')
            choose_view = functools.partial(self.view, seed=seed)
            limits = {"max_pixels": self.max_pixels, "formats": self.formats}
            return torch.from_numpy(decode_kept(_as_bytes(data), choose_view, size=size, **limits))
        out = np.empty(self.row.shape, np.uint8)
        self.decode_into(data, out, seed)
        return torch.from_numpy(out).permute(2, 0, 1)

    @property
    def _shape(self) -> tuple[int, int]:
        """(height, width) of a sample."""
        assert self.size is not None
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    def decode_into(self, data: bytes, out: NDArray[np.uint8], seed: int | None = None) -> None:
        """Decode into ``out``, C-contiguous uint8 [H, W, 3]; leaves ``out`` unchanged if decoding fails.

        Args:
            data: the bytes of one image file, or any object with a buffer.
            seed: 64-bit integer; required if ``takes_seed``, otherwise ignored.
        """
        _check_output(out, self.row)
        self._decode(_as_bytes(data), out, lambda width, height: self.view(width, height, seed))
        if self._augment_row is not None:
            self._augment_row(out, seed or 0)

    def decode_many_into(
        self, data: Sequence[bytes], out: NDArray[np.uint8], seeds: Sequence[int] | None = None
    ) -> list[Exception | None]:
        """Decode N files into ``out``, uint8 [N, H, W, 3], as ``decode_into`` does; JPEGs in one call if possible.

        Args:
            data: N files, as ``decode_into`` takes them.
            out: each row C-contiguous.
            seeds: N seeds; required if ``takes_seed``.

        Returns:
            N entries: the file's error, or ``None``. Rows of files with an error are unchanged.
        """
        count = len(data)
        if out.ndim != 4 or len(out) != count:
            raise ValueError(f"out must be uint8 {[count, *self.row.shape]}, got {out.dtype} {list(out.shape)}")
        if count:
            _check_output(out[0], self.row)
        if seeds is not None and len(seeds) != count:
            raise ValueError(f"seeds must be as many as data, {count}, got {len(seeds)}")
        errors: list[Exception | None] = [None] * count
        files = list(data)
        for i, file in enumerate(files):
            if type(file) is not bytes:
                try:
                    files[i] = _as_bytes(file)
                except TypeError as error:
                    files[i], errors[i] = b"", error

        fixed_view = functools.cache(self.view)  # pictures of one dataset often share a few sizes

        def choose_view(i: int, width: int, height: int) -> View:
            if not self.takes_seed:
                return fixed_view(width, height)
            return self.view(width, height, None if seeds is None else seeds[i])

        remaining: Iterable[int] = range(count)
        if (native := self._native()) is not None:
            remaining = native.decode(files, out, choose_view, max_pixels=self.max_pixels)
        for i in remaining:
            if errors[i] is None:
                try:
                    self._decode_alone(files[i], out[i], functools.partial(choose_view, i))
                except Exception as error:  # noqa: BLE001 - one file's error must not affect the other files
                    errors[i] = error
        augment_row = self._augment_row
        for i, seed in enumerate(seeds or ()):
            if errors[i] is None and augment_row is not None:
                try:
                    augment_row(out[i], seed)
                except Exception as error:  # noqa: BLE001 - of the user's code, for one file
                    errors[i] = error
        return errors

    def _native(self) -> NativeDecoder | None:
        """Return the native library, or ``None`` if it is not installed or the settings rule it out."""
        if not self.scaled or self.backend in ("pillow", "turbo") or not {"JPEG", "MPO"} & set(self.formats):
            return None
        # Looked up at each call: a decoder may be pickled on one machine and decode on another.
        return required_native_decoder() if self.backend == "native" else native_decoder()

    def _decode(self, data: bytes, out: NDArray[np.uint8], choose_view: Callable[[int, int], View]) -> None:
        """Fill ``out``, uint8 [H, W, 3], with ``choose_view(width, height)`` of the upright picture."""
        native = self._native()
        if native is None or native.decode(
            [data], out[np.newaxis], lambda _, width, height: choose_view(width, height), max_pixels=self.max_pixels
        ):
            self._decode_alone(data, out, choose_view)

    def _decode_alone(self, data: bytes, out: NDArray[np.uint8], choose_view: Callable[[int, int], View]) -> None:
        """Decode like ``_decode``, with simplejpeg, imagecodecs or Pillow."""
        decode_plain = None if self.backend == "pillow" else _plain_decoder()
        if decode_plain is None or not decode_plain(self, data, out, choose_view):
            self._decode_with_pillow(data, choose_view, out)

    def _decode_with_pillow(self, data: bytes, choose_view: Callable[[int, int], View], out: NDArray[np.uint8]) -> None:
        """Write the view of an upright picture, loaded by Pillow, into ``out``."""
        from aiofeed.kernel.decoders.pillow import load_picture, render

        target = (out.shape[1], out.shape[0]) if self.scaled else None
        render(*load_picture(data, choose_view, target=target, max_pixels=self.max_pixels, formats=self.formats), out)

    @property
    def _cached_shape(self) -> tuple[int, int]:
        """(height, width) of a cached picture."""
        height, width, _ = self.row.shape
        if self.crop != "random":
            return height, width
        if self.cached_size is None:
            return -(-height * 5 // 4), -(-width * 5 // 4)
        return self.cached_size if isinstance(self.cached_size, tuple) else (self.cached_size, self.cached_size)

    def decode_cached_into(self, data: bytes, out: NDArray[np.uint8]) -> None:
        """Decode into ``out``, of ``cached_row``, all that does not depend on a seed: the form that a cache stores."""
        _check_output(out, self.cached_row)
        data = _as_bytes(data)
        if self.crop != "random":
            self._decode(data, out, lambda width, height: View(self._fixed_box(width, height)))
            return
        original = (0, 0)

        def whole_picture(width: int, height: int) -> View:
            nonlocal original
            original = width, height
            return View((0, 0, width, height))

        height, width = self._cached_shape
        pixels = np.empty((height, width, 3), np.uint8)
        self._decode_with_pillow(data, whole_picture, pixels)
        out[: pixels.size] = pixels.reshape(-1)
        out[pixels.size :] = np.frombuffer(_ORIGINAL_SIZE.pack(*original), np.uint8)

    def augment_into(self, cached: NDArray[np.uint8], out: NDArray[np.uint8], seed: int | None = None) -> None:
        """Write into ``out``, of ``row``, the view that ``seed`` selects of a cached picture."""
        height, width, _ = self.row.shape
        if self.crop == "random":
            from aiofeed.kernel.decoders.pillow import render

            render(*self._crop_cached_picture(cached, seed), out)
        elif self.takes_seed and self.view(width, height, seed).flip:
            for channel in range(3):  # numpy reverses single bytes faster than groups of three
                out[:, :, channel] = cached[:, ::-1, channel]
        else:
            out[...] = cached
        if self._augment_row is not None:
            self._augment_row(out, seed or 0)

    def _crop_cached_picture(self, cached: NDArray[np.uint8], seed: int | None) -> tuple[Image.Image, View]:
        """Return the rows of a cached picture that the view of a seed needs, and that view in their pixels."""
        from PIL import Image

        height, width = self._cached_shape
        original: tuple[int, int] = _ORIGINAL_SIZE.unpack(cached[height * width * 3 :].tobytes())
        box, flip = self.view(*original, seed)
        left, upper, right, lower = map_box(box, original, (width, height))
        # The filter needs `margin` rows more on both sides. All columns, so that the rows are contiguous.
        margin = math.ceil(max((lower - upper) / self.row.shape[0], 1.0)) + 1
        first, last = max(math.floor(upper) - margin, 0), min(math.ceil(lower) + margin, height)
        pixels = cached[first * width * 3 : last * width * 3]
        picture = Image.frombuffer("RGB", (width, last - first), pixels, "raw", "RGB", 0, 1)
        return picture, View((left, upper - first, right, lower - first), flip)

    def fingerprint(self) -> str:
        """Identifies the cached form: every setting that changes it, and the versions of Pillow and the native library.

        Caches on disk store this text: changing its wording makes them unusable.
        """
        if self.crop == "random":
            form = f"whole pictures of {list(self._cached_shape)}"
        else:
            form = f"size={self.size}, resize={self.resize}"
        versions = _PILLOW
        native = None if self.crop == "random" else self._native()
        if native is not None:
            versions += f", libjpeg-turbo {native.version} by itself"
        if self.mode == "keep":
            form += ", mode=keep"
        rules = f"scaled={self.scaled}, max_pixels={self.max_pixels}, formats={','.join(self.formats)}"
        return f"{type(self).__name__}: {form}, {rules}, {versions}"

    def view(self, width: int, height: int, seed: int | None = None) -> View:
        """Return the part of an upright picture of width x height pixels that ``seed`` selects. Pure."""
        if not self.takes_seed:
            return View(self._fixed_box(width, height))
        if seed is None:
            raise ValueError(f"{self!r} is random: it needs a seed")
        numbers = SplitMix64(seed)
        # Drawn first and always: the crop of a seed must not depend on `flip`.
        mirrored = numbers.random() < 0.5
        if self.crop == "random":
            box = random_box(width, height, self.scale, self.ratio, numbers)
        else:
            box = self._fixed_box(width, height)
        return View(box, self.flip and mirrored)

    def _fixed_box(self, width: int, height: int) -> Box:
        if not isinstance(self.size, int):
            return 0, 0, width, height
        return center_box(width, height, self.size, self.resize or self.size)


def _parse_size(name: str, size: Any) -> int | tuple[int, int]:
    """Return an int of at least 1, or a pair of them as a tuple."""
    if isinstance(size, (tuple, list)):
        if len(size) != 2:
            raise ValueError(f"{name} must be an int or a pair (height, width), got {size!r}")
        return check_positive_int(f"height in {name}", size[0]), check_positive_int(f"width in {name}", size[1])
    if not hasattr(type(size), "__index__"):
        raise TypeError(f"{name} must be an int, (height, width) or None, got {size!r}")
    return check_positive_int(name, size)


def _parse_range(name: str, value: Any, *, highest: float) -> tuple[float, float]:
    """Return a pair of finite numbers above 0, in ascending order."""
    allowed = f"0 < low <= high{' <= 1' if highest == 1.0 else ''}"
    try:
        low, high = (float(bound) for bound in value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a pair (low, high) of numbers with {allowed}, got {value!r}") from None
    if not (0 < low <= high <= highest and math.isfinite(high)):
        raise ValueError(f"{name} must be a pair (low, high) with {allowed}, got {value!r}")
    return low, high


def _parse_formats(formats: Any) -> tuple[str, ...]:
    """Format names in upper case, without duplicates."""
    if isinstance(formats, str) or not isinstance(formats, Iterable):
        raise TypeError(f"formats must be a tuple of names, such as {FORMATS!r}, got {formats!r}")
    formats = tuple(formats)
    if not all(isinstance(name, str) for name in formats):
        raise TypeError(f"formats must be a tuple of names, such as {FORMATS!r}, got {formats!r}")
    names = tuple(dict.fromkeys(name.upper() for name in formats))
    if not names:
        raise ValueError("formats must contain at least one name, got none")
    if set(names) <= set(FORMATS):  # installed or not
        return names
    from aiofeed.kernel.decoders.pillow import known_formats

    if unknown := set(names) - known_formats():  # this loads all plugins
        known = ", ".join(sorted(known_formats()))
        raise ValueError(f"formats contains {min(unknown)!r}, which this Pillow cannot open; it can open {known}")
    return names


def _check_output(out: NDArray[np.uint8], row: Row) -> None:
    if out.shape != row.shape or out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"out must be writable C-contiguous uint8 {list(row.shape)}, "
            f"got {out.dtype} {list(out.shape)} with strides {out.strides}, writable={out.flags.writeable}"
        )


@functools.cache
def _plain_decoder() -> Callable[..., bool] | None:
    """Return what decodes plain files by simplejpeg and imagecodecs; ``None`` without that add-on: Pillow does it."""
    try:
        return _load_addon("decode_plain", "simplejpeg")  # type: ignore[no-any-return]
    except ImportError:
        return None


_as_bytes = functools.partial(check_bytes, "DecodeImage", file="image")
