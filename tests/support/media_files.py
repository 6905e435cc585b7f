"""Makes files of video and audio with PyAV. Each frame of a video shows its number."""

from __future__ import annotations

import io
import re
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
# A frame of MPEG-4 without contents, at 25 frames per second.
_EMPTY = bytes([0, 0, 1, 0xB6, 0b01010000, 0b01011111])
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
    packed: bool = False,
    copied: bool = False,
    **options: str,
) -> bytes:
    """A video of 25 frames per second; ``timestamps`` are in 25ths of a second.

    ``packed`` has B-frames as DivX packs them; ``copied`` has no times of showing, as copied from AVI.
    """
    import av

    if packed or copied:
        given = video(frames, container="avi", codec="mpeg4" if packed else codec, key_every=key_every, **options)
        return remuxed(given, container, _pack if packed else list)
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


def remuxed(data: bytes, container: str, change: Callable[[list[bytes]], list[bytes]] = list) -> bytes:
    """The packets of a video, one each 25th of a second by the time of decoding, without times of showing."""
    import av

    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format=container) as output:
        given: Any = source.streams.video[0]
        stream: Any = output.add_stream_from_template(given)
        packets = [packet for packet in source.demux(given) if packet.size]
        for number, content in enumerate(change([bytes(packet) for packet in packets])):
            packet = av.Packet(content)
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, 25), packets[number].is_keyframe
            packet.pts = packet.dts = number
            output.mux(packet)
    return file.getvalue()


def _pack(packets: list[bytes]) -> list[bytes]:
    """Put B-frames of MPEG-4 into the packet of the frame before, as DivX and Xvid do; a later packet has none."""
    # The decoder looks for packed frames if the packets name DivX and end with "p".
    packets = [re.sub(rb"Lavc[0-9.]+", b"DivX503b1393p", packet) for packet in packets]
    # Two bits behind the start code say what a frame is: 0 for I, 1 for P, 2 for B.
    is_b = [packet[packet.index(b"\0\0\1\xb6") + 4] >> 6 == 2 for packet in packets] + [False]
    found: list[bytes] = []
    for at, packet in enumerate(packets):
        held = packets[at + 1] if is_b[at + 1] else b""
        found.append((held or _EMPTY) if is_b[at] else packet + held)
    return found


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
