"""Makes files of video and audio with PyAV. Each frame of a video shows its number."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BITS = 8
WIDTH, HEIGHT = 128, 96
# Faces the viewer after a turn by 90 degrees clockwise, as phones store it.
TURNED = struct.pack(">9i", 0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000)


def picture_of(number: int) -> NDArray[np.uint8]:
    """A picture of 8 stripes, which are the bits of a number; the highest bit is on the left."""
    bits = [number >> bit & 1 for bit in reversed(range(BITS))]
    row = np.repeat(np.array(bits, np.uint8) * 200 + 28, WIDTH // BITS)
    return np.broadcast_to(row[None, :, None], (HEIGHT, WIDTH, 3)).copy()


def numbers_in(frames: Any) -> list[int]:
    """The numbers that frames show, uint8 [frames, 3, H, W], whose whole width is visible."""
    pixels = np.asarray(frames).mean(axis=(1, 2))  # [frames, W]
    stripes = pixels.reshape(len(pixels), BITS, -1).mean(axis=2) > 128
    return [int("".join("01"[int(bit)] for bit in stripe), 2) for stripe in stripes]


def video(
    frames: int = 60,
    *,
    container: str = "mp4",
    codec: str = "libx264",
    key_every: int = 12,
    timestamps: list[int] | None = None,
    sound: bool = False,
    container_options: dict[str, str] | None = None,
    **options: str,
) -> bytes:
    """A video of 25 frames per second; ``timestamps`` are in 25ths of a second."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container, container_options=container_options or {}) as output:
        stream: Any = output.add_stream(codec, rate=25, options={"threads": "1", **options})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = WIDTH, HEIGHT, "yuv420p", key_every
        stream.codec_context.time_base = Fraction(1, 25)
        audio: Any = output.add_stream("aac", rate=16000, layout="mono") if sound else None
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture_of(number), format="rgb24")
            frame.pts, frame.time_base = (timestamps or range(frames))[number], Fraction(1, 25)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if audio is not None:
            output.mux(audio.encode(_audio_frame(np.zeros((1, 16000), np.float32), 16000)))
            output.mux(audio.encode(None))
    return file.getvalue()


def remuxed(
    data: bytes, container: str, change: Callable[[list[tuple[bytes, bool]]], list[tuple[bytes, bool]]]
) -> bytes:
    """The packets of an MP4 file, changed as (bytes, is key frame), one each 25th of a second."""
    import av

    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format=container) as output:
        given: Any = source.streams.video[0]
        stream: Any = output.add_stream_from_template(given)
        packets = [(bytes(packet), packet.is_keyframe) for packet in source.demux(given) if packet.size]
        first, *others = change(packets)
        extra = (given.codec_context.extradata or b"") if given.codec.name == "mpeg4" else b""
        for number, (content, is_key) in enumerate([(extra + first[0], first[1]), *others]):
            packet = av.Packet(content)
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, 25), is_key
            packet.pts = packet.dts = number
            output.mux(packet)
    return file.getvalue()


def packed_avi(frames: int = 60) -> bytes:
    """An AVI file of MPEG-4 whose B-frames are in the packet of the frame before, as DivX and XviD write it."""

    def pack(packets: list[tuple[bytes, bool]]) -> list[tuple[bytes, bool]]:
        # Two bits behind the start code say what a frame is: 0 for I, 1 for P, 2 for B.
        is_b = [data[data.index(b"\0\0\1\xb6") + 4] >> 6 == 2 for data, _ in packets] + [False]
        found: list[tuple[bytes, bool]] = []
        for at, (data, is_key) in enumerate(packets):
            if is_b[at]:
                found.append((b"\0\0\1\xb6\x5f\x18", False))  # no picture
            else:
                found.append((data + packets[at + 1][0] if is_b[at + 1] else data, is_key))
        return [(b"\0\0\1\xb2DivX503b1393p" + found[0][0], True), *found[1:]]

    return remuxed(video(frames, codec="mpeg4", bf="1"), "avi", pack)


def turned(data: bytes, matrix: bytes = TURNED) -> bytes:
    """An MP4 file whose header turns the picture by 90 degrees clockwise, or as another matrix says."""
    at = data.index(b"tkhd") + 44
    return data[:at] + matrix + data[at + 36 :]


def cut(data: bytes, seconds: Fraction, kind: str = "video") -> bytes:
    """An MP4 file that begins that much later by its edit list, as ``ffmpeg -ss -c copy`` writes it."""
    import av

    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format="mp4") as output:
        given: Any = source.streams.best(kind)  # type: ignore[call-overload]
        stream: Any = output.add_stream_from_template(given)
        for packet in source.demux(given):
            if packet.dts is not None and packet.pts is not None:
                back = round(seconds / given.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts - back, packet.dts - back, stream
                output.mux(packet)
    return file.getvalue()


def shortened(data: bytes) -> bytes:
    """An MP4 file that ends at its half by its edit list."""
    at = data.index(b"elst") + 12
    [duration] = struct.unpack(">I", data[at : at + 4])
    return data[:at] + struct.pack(">I", duration // 2) + data[at + 4 :]


def chirp(seconds: float, rate: int, channels: int = 1) -> NDArray[np.float32]:
    """A tone of each channel that rises, so that no part is like another: float32 [channels, samples]."""
    t = np.arange(round(seconds * rate)) / rate
    return np.stack([0.3 * np.sin(2 * np.pi * (150 * (c + 1) + 60 * t) * t) for c in range(channels)]).astype("f4")


def sound(
    samples: NDArray[np.float32], rate: int, *, container: str = "wav", codec: str = "pcm_f32le", form: str = "flt"
) -> bytes:
    """An audio file with these samples, [channels, samples]."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        layout = "mono" if len(samples) == 1 else "stereo"
        stream: Any = output.add_stream(codec, rate=rate, layout=layout, format=form)
        if samples.size:
            output.mux(stream.encode(_audio_frame(samples, rate)))
        output.mux(stream.encode(None))
    return file.getvalue()


def _audio_frame(samples: NDArray[np.float32], rate: int) -> Any:
    import av

    layout = "mono" if len(samples) == 1 else "stereo"
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
    frame.sample_rate = rate
    return frame
