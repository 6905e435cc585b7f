"""``Episodes``: moments of recorded episodes, each with windows of rows and of frames around it."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from aiofeed.common.blocking import run_blocking
from aiofeed.common.grouped_source import GroupedSource
from aiofeed.episodes.lerobot import describe
from aiofeed.episodes.moments import Moments
from aiofeed.episodes.videos import Frames, read_frames
from aiofeed.kernel.core.faces import Exclusion
from aiofeed.kernel.core.statistics import StorageStatistics
from aiofeed.kernel.core.types import Collate, Traits, public
from aiofeed.kernel.core.validation import check_int_from, check_positive_int, explain_arguments
from aiofeed.kernel.runtime.machine import free_memory
from aiofeed.kernel.sources.file_io import Content
from aiofeed.kernel.sources.subset import Indices
from aiofeed.media.container import import_av
from aiofeed.media.frames import FramePool
from aiofeed.objects.reader import ObjectReader, statistics_of
from aiofeed.tables.columns import collate_rows

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# Rows up to this share (1 / MEMORY_SHARE) of free memory are gathered in the consumer's thread.
MEMORY_SHARE = 2


class Moment(NamedTuple):
    """A sample before its frames are decoded."""

    fields: dict[str, Any]
    frames: dict[str, Frames]


@public
@explain_arguments(
    {
        "delta_timestamps": "it is called windows",
        "repo_id": 'pass the folder of the data set, or its URL: "hf://datasets/owner/name"',
        "return_uint8": "frames are uint8: divide them by 255 in transform= of Feeder, on the device",
        "drop_n_last_frames": "it is called drop_last_frames",
    }
)
class Episodes(GroupedSource):
    """Moments of the episodes of a LeRobot data set (3.0 or 2.1), each with windows of rows and frames around it.

    Example:
        ```python
        import aiofeed

        windows = {"action": [step / 10 for step in range(8)]}  # seconds from the moment
        episodes = aiofeed.Episodes("lerobot/av1", windows)
        for batch in aiofeed.Feeder(episodes, batch_size=16, shuffle="window"):
            print(batch["observation.images.top"].shape, batch["action"].shape)
        ```

    A sample is a dict as an item of LeRobot's ``LeRobotDataset``: each camera uint8 [3, H, W], or [n, 3, H, W] with
    n > 1 offsets; each column its shape, with offsets [n, ...]; ``NAME_is_pad`` bool [n] for each window, true where it
    reaches beyond the episode and repeats its first or last row; ``task``, a string. A batch has a tensor for each
    field, and a list of tasks. Pass no ``decode=``. Needs ``pip install "aiofeed[media,parquet]"``.

    Columns of the chosen episodes are in memory. Without cameras a batch is one gather for each column. Of videos the
    key-frame groups of the frames are read and decoded, by decoders that stay open, and no file does.
    ``shuffle="window"`` and ``shuffle=False`` decode each group once and keep its frames for the moments nearby.

    Args:
        root: The folder of the data set, or its URL.
        windows: Offsets in seconds by name, as LeRobot's ``delta_timestamps``. A camera or column without any has the
            moment itself.
        features: The names to read. Default: all, and ``task``.
        episodes: The numbers of the episodes to read. Default: all.
        drop_last_frames: Rows at the end of each episode that are no samples. Windows still reach to its end.
        rename: Names of the data set, and those that they get here. The other arguments have the new names.
        fill: Values of a row by name, for fields that the data set lacks: a mixture needs the same fields of all its
            data sets. ``NAME_is_pad`` of a window of them is true.
        tolerance_s: A frame this far or further from its time is an error, which ``on_error=`` may skip.
        run: Rows of an episode whose frames come together with ``shuffle="window"``, fewer if ``decoded_bytes``
            requires it. They are the shards of which it mixes 16.
        decoded_bytes: The most memory of each process for decoded frames that are kept for other moments.
        store: An obstore store that reads the URL. Default: made of the URL.
        options: Arguments of ``obstore.store.from_url``.

    Raises:
        FileNotFoundError: A file of the description or of rows is missing. A missing video is an error of its samples.
        ImportError: PyAV, pyarrow or obstore is not installed.
        OSError, TypeError, ValueError: An argument has the wrong type or does not fit the data set, or that is damaged.
    """

    # fmt: off
    excluded: ClassVar[Sequence[Exclusion]] = (
        (("EncodedCache",), ("windows of Episodes",), TypeError,
         "it keeps the bytes of samples, and those of a window are parts of videos that others need: copy the data set "
         "to the local disk, or pass cache=DiskCache(path), which keeps decoded samples"),
    )
    # fmt: on
    """As of ``Table``: a sample is a row."""
    answers_at_once: bool
    looks_ahead: bool

    def __init__(
        self,
        root: str | os.PathLike[str],
        windows: Mapping[str, Sequence[float]] | None = None,
        *,
        features: Sequence[str] | None = None,
        episodes: Iterable[int] | None = None,
        drop_last_frames: int = 0,
        rename: Mapping[str, str] | None = None,
        fill: Mapping[str, Any] | None = None,
        tolerance_s: float = 1e-4,
        run: int = 64,
        decoded_bytes: int = 2 << 30,
        store: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        given = dict(locals())
        check_int_from(0, "Episodes(drop_last_frames=)", drop_last_frames)
        check_positive_int("Episodes(run=)", run)
        self._decoded_bytes = check_positive_int("Episodes(decoded_bytes=)", decoded_bytes)
        reader = ObjectReader(os.fspath(root), store=store, options=options)
        self._of = moments = Moments(run_blocking(lambda: describe(reader)), given)
        self._whole = False
        self.collate: Collate | None = None
        self._pool: FramePool | None = None
        self.shard_starts: NDArray[np.int64] = np.append(moments.runs(run, decoded_bytes), len(self))
        """The first moment of each run, and the number of moments."""
        decoded = bool(moments.cameras)
        self.traits: Traits = Traits(decode="none") if decoded else Traits(decode="optional", rows=True)
        self.answers_at_once = not decoded
        self.looks_ahead = decoded and not reader.is_local
        sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in moments.fields.values()]
        self.sample_bytes: int = sum(sizes)
        """Bytes of a sample, without what says which rows are padding."""
        if decoded:
            import_av()

    def facts(self, arguments: Any) -> Mapping[str, str]:
        """Return whether samples are windows with frames."""
        return {"windows of Episodes": repr(self)} if self.traits.decode == "none" else {}

    def for_neighbours(self) -> Self:
        """Return these moments, whose frames are kept for other moments, as pays if those nearby come soon."""
        found = copy.copy(self)
        found._pool = FramePool(self._decoded_bytes)
        return found

    sharing_frames = for_neighbours

    def __len__(self) -> int:
        """Return the number of moments."""
        return int(self._of.starts[-1])

    def __repr__(self) -> str:
        return f"Episodes({self._of.name!r})"

    def __getitem__(self, indices: int | Indices) -> Any:
        """One sample, as from a ``Dataset``; or a part, as of other sources."""
        if not isinstance(indices, int | np.integer):
            return super().__getitem__(indices)
        at = range(len(self))[indices]
        return self.decoder(run_blocking(lambda: self.read(at)) if self.looks_ahead else self._moments([at])[0])

    @property
    def decoder(self) -> WindowDecoder:
        """The decoder that a feeder uses."""
        return WindowDecoder(self._pool)

    def key(self, index: int, /) -> str:
        """Return the data set, the episode, the row in it, and its time."""
        [episode], [row] = self._of.place(np.array([index]))
        seconds = row / self._of.data.fps
        return f"{self._of.name}[episode {self._of.episodes[episode]}, frame {row}, {seconds:.3f} s]"

    def fingerprint(self) -> str:
        """Return a digest of the names and lengths of the episodes, and of all arguments that change samples."""
        digest = hashlib.sha256(repr(self._of.identity).encode("utf-8", "surrogatepass"))
        for each in (self._of.episodes, self._of.lengths, *self._of.fill.values()):
            digest.update(each.tobytes())
        return digest.hexdigest()[:32]

    def content_parts(self) -> list[Content]:
        """Return the files of rows and the videos in a folder."""
        data, cameras = self._of.data, self._of.cameras.values()
        keys = [*data.keys, *(key for camera in cameras for key in camera.keys)] if data.reader.is_local else []
        return [Content(data.reader.url(key)) for key in keys]

    def nbytes(self, index: int, /) -> int:
        """About the encoded bytes of a moment: 0.8 bits for a pixel."""
        return self.sample_bytes // 30

    def storage_statistics(self) -> StorageStatistics | None:
        """Return the requests for files at URLs in this process; ``None`` for folders."""
        return statistics_of([self._of.data.reader])

    @property
    def statistics(self) -> dict[str, dict[str, torch.Tensor]]:
        """For each column ``mean``, ``std``, ``min`` and ``max``, float32.

        They are computed of all rows of the chosen episodes, each time. The standard deviation is that of LeRobot, of
        the population.
        """
        import torch

        found = self._of.statistics()
        return {name: {key: torch.from_numpy(value) for key, value in each.items()} for name, each in found.items()}

    # --- rows

    def take(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return all fields of moments except frames, as arrays; tasks as a list."""
        return self._with_texts(self._of.take(rows))

    def _with_texts(self, fields: dict[str, Any]) -> dict[str, Any]:
        if "task" in fields:
            fields["task"] = [self._of.data.tasks[number] for number in fields["task"].tolist()]
        return fields

    def structure(self) -> Mapping[str, Sequence[int]]:
        """Return the shapes of the fields."""
        rows = self._of.take(np.zeros(1, np.int64))
        return {name: shape for name, (shape, _) in self._of.fields.items()} | {
            name: value.shape[1:] for name, value in rows.items()
        }

    def in_batches(self) -> Self:
        """Return moments without cameras, of which a batch is gathered at once; itself with cameras."""
        if not self.traits.rows:
            return self
        found = copy.copy(self)
        found._whole = True
        found.collate = collate_rows
        return found

    @property
    def in_memory(self) -> bool:
        """Whether batches are gathered in the consumer's thread."""
        return self._whole and self.sample_bytes * len(self) * MEMORY_SHARE <= free_memory()

    def gathered(self, indices: NDArray[np.int64], memory: object) -> list[NDArray[Any]]:
        """Return each field of moments."""
        return list(self._of.take(indices).values())

    def form_batch(self, rows: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return a batch of the fields of moments."""
        return self._with_texts(dict(zip(self._of.take(np.zeros(1, np.int64)), rows, strict=True)))

    def read_now(self, indices: Sequence[int], /) -> list[Any]:
        """Return samples, whose frames decoding reads."""
        if self._whole:
            return [(self, index) for index in indices]
        moments = self._moments(indices)
        return [moment.fields for moment in moments] if self.answers_at_once else moments

    # --- frames

    def _moments(self, indices: Sequence[int]) -> list[Moment]:
        rows = np.asarray(indices, np.int64)
        fields = self.take(rows)
        tasks = fields.pop("task", None)
        found = []
        for at, frames in enumerate(self._of.frames(rows)):
            found.append(Moment({name: values[at, ...] for name, values in fields.items()}, frames))
            if tasks is not None:
                found[-1].fields["task"] = tasks[at]
        return found

    async def read_many(self, indices: Sequence[int], /) -> list[Any]:
        """Samples whose frames are encoded, or the error of each that cannot be read. Of a folder, decoding reads."""
        found = self.read_now(indices)
        if self.looks_ahead:
            await read_frames(found, whole=self._pool is not None)
        return found


class WindowDecoder:
    """Decodes the frames of moments; ``pool`` keeps frames for other moments."""

    def __init__(self, pool: FramePool | None) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return "WindowDecoder()"

    def fingerprint(self) -> str:
        """Return the same for all: the source has the arguments."""
        return "WindowDecoder"

    def __call__(self, moment: Moment, /) -> dict[str, Any]:
        """Decode the frames of a moment."""
        import torch

        sample: dict[str, Any] = {}
        for name, frames in moment.frames.items():
            try:
                sample[name] = torch.from_numpy(frames.decode(self._pool))
            except (OSError, ValueError) as error:
                raise ValueError(f"camera {name!r} at {frames}: {error}") from error
        for name, value in moment.fields.items():
            sample[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        return sample
