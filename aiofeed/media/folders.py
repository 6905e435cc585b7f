"""Folders of videos and of recordings, with one sub-folder per class: ``VideoFolder`` and ``AudioFolder``."""

from __future__ import annotations

from aiofeed.kernel.core.types import public
from aiofeed.kernel.sources.image_folder import ImageFolder


@public
class VideoFolder(ImageFolder):
    """One sample per video in ``root/class_name/.../video.mp4``; its target is the number of its class. For ``Clips``.

    Example:
        ```python
        import aiofeed

        clips = aiofeed.Clips(aiofeed.VideoFolder("actions"), frames=8, size=112)
        for video, label in aiofeed.Feeder(clips, batch_size=2, shuffle=True):
            print(video.shape, label)
        ```

    In short ``Clips("actions", frames=8)``. Classes, order, arguments and errors are those of ``ImageFolder``. Videos
    are files whose names end in .mp4, .m4v, .mov, .mkv, .webm, .avi, .mpg, .mpeg, .ts, .m2ts, .mts, .3gp, .flv, .ogv or
    .wmv, in any case. The path of a video is ``paths[index]``.
    """

    _endings = tuple(".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .ts .m2ts .mts .3gp .flv .ogv .wmv".split())  # noqa: SIM905
    _what = "video"


@public
class AudioFolder(ImageFolder):
    """One sample per recording in ``root/class_name/.../sound.wav``; its target is the number of its class.

    Example:
        ```python
        import aiofeed

        words = aiofeed.AudioFolder("words")
        decode = aiofeed.DecodeAudio(rate=16000, seconds=1.0)
        for sound, label in aiofeed.Feeder(words, decode=decode, batch_size=2, shuffle=True):
            print(sound.shape, label)
        ```

    Classes, order, arguments and errors are those of ``ImageFolder``. Recordings are files whose names end in .wav,
    .flac, .mp3, .ogg, .oga, .opus, .m4a, .aac, .aif, .aiff, .au, .caf, .wma or .mka, in any case.
    """

    _endings = tuple(".wav .flac .mp3 .ogg .oga .opus .m4a .aac .aif .aiff .au .caf .wma .mka".split())  # noqa: SIM905
    _what = "recording"
