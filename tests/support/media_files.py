"""Makes files of video and audio with PyAV. Each frame of a video shows its number."""

from __future__ import annotations

import io
import re
import struct
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
    **options: str,
) -> bytes:
    """A video of 25 frames per second; ``timestamps`` are in 25ths of a second; ``packed``: of DivX, with B-frames."""
    import av

    if packed:
        given = video(frames, container="avi", codec="mpeg4", key_every=key_every, **options)
        return _packed(given, container)

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


def _packed(data: bytes, container: str) -> bytes:
    """MPEG-4 as DivX and Xvid pack it: a packet has a P-frame and the B-frame before it, a later one none."""
    import av

    def kind_of(packet: bytes) -> int:
        return packet[packet.index(b"\0\0\1\xb6") + 4] >> 6

    file, packets = io.BytesIO(), list[bytes]()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format=container) as output:
        given = source.streams.video[0]
        stream: Any = output.add_stream_from_template(given)
        # The decoder looks for packed frames if the packets name DivX and end with "p".
        texts = [re.sub(rb"Lavc[0-9.]+", b"DivX503b1393p", bytes(packet)) for packet in source.demux(given)]
        for text in filter(None, texts):
            if kind_of(text) != 2:
                packets.append(text)
            elif kind_of(packets[-1]) != 2 and packets[-1] != _EMPTY:
                packets[-1] += text
                packets.append(_EMPTY)
            else:
                packets[-1:] = [text, _EMPTY]
        for number, text in enumerate(packets):
            packet = av.Packet(text)
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1, 25)
            packet.is_keyframe = kind_of(text) == 0
            output.mux(packet)
    return file.getvalue()


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
