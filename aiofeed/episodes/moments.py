"""The moments of one data set: which rows and frames of an episode each needs, and their values as arrays."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiofeed.common.blocking import run_blocking
from aiofeed.episodes.lerobot import Camera, LeRobotData, as_lerobot
from aiofeed.episodes.videos import Frames, Video

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64 = NDArray[np.int64]

# Runs that shuffle="window" mixes, and one whose frames are not used any more.
RUNS = 17


class Moments:
    """The moments of some episodes of a data set. Arguments as for ``Episodes``.

    Attributes:
        fields: Shape and dtype of each camera and column.
        padded: The fields with a window.
        starts: The first moment of each episode, and the number of moments.
    """

    def __init__(self, data: LeRobotData, given: Mapping[str, Any]) -> None:
        features, episodes, drop_last_frames = (given[key] for key in ("features", "episodes", "drop_last_frames"))
        windows, rename, fill = (given[key] or {} for key in ("windows", "rename", "fill"))
        self.data: LeRobotData = data
        self._tolerance_s: float = given["tolerance_s"]
        self.name: str = data.reader.url("").rstrip("/")
        total, names = len(data.lengths), [*data.cameras, *data.shapes, *data.others]
        numbers = [operator.index(each) for each in (range(total) if episodes is None else episodes)]
        self.episodes: Int64 = np.unique(np.array(numbers, np.int64))
        old_names = {rename.get(name, name): name for name in names}
        if len(old_names) < len(names):
            raise ValueError(f"{self.name}: Episodes(rename=) gives two of {names} the same name: {dict(rename)}")
        fill = {name: np.asarray(value) for name, value in fill.items() if name not in old_names}
        fill = {name: each if each.dtype == np.uint8 else as_lerobot(each) for name, each in fill.items()}
        known = [*old_names, *fill, "task"]
        chosen = known if features is None else list(features)
        checks = [("episodes", self.episodes.tolist(), range(total)), ("rename", rename, names)]
        for argument, wanted, among in (*checks, ("features", chosen, known), ("windows", windows, known[:-1])):
            if missing := [each for each in wanted if each not in among]:
                raise ValueError(f"{self.name}: Episodes({argument}=) has {missing}, and there are {among}")
        if refused := {name: why for name in chosen if (why := data.others.get(old_names.get(name, "")))}:
            rest = [name for name in chosen if name not in refused]
            raise ValueError(f"{self.name}: Episodes does not read {refused}: pass features={rest}")
        old = {name: old_names[name] for name in old_names if name in chosen}
        self.cameras: dict[str, Camera] = {
            name: data.cameras[each] for name, each in old.items() if each in data.cameras
        }
        self._names = {name: each for name, each in old.items() if each in data.shapes}
        self.fill: dict[str, NDArray[Any]] = {name: value for name, value in fill.items() if name in chosen}
        self.has_task: bool = "task" in chosen
        self._steps = {name: self._steps_of(name, offsets) for name, offsets in windows.items()}
        self.padded: list[str] = [name for name in windows if name in chosen]
        self.lengths: Int64 = data.lengths[self.episodes]
        self._rows = np.append(0, np.cumsum(self.lengths))
        self.starts: Int64 = np.append(0, np.cumsum(np.maximum(self.lengths - drop_last_frames, 0)))
        if not self.starts[-1]:
            raise ValueError(f"{self.name}: no rows are left")
        needed = {*self._names.values(), "timestamp", *(["task_index"] if self.has_task else [])}
        self._columns = run_blocking(lambda: data.load(sorted(needed), self.episodes))
        if self.has_task and (unknown := set(self._columns["task_index"].reshape(-1).tolist()) - data.tasks.keys()):
            raise ValueError(f"{self.name}: the rows have the tasks {sorted(unknown)[:10]}, which have no text")
        self.fields: dict[str, tuple[tuple[int, ...], str]] = {
            name: self._field(name, (3, *camera.size), "uint8") for name, camera in self.cameras.items()
        }
        first = {name: self._columns[each][0] for name, each in self._names.items()} | self.fill
        self.fields |= {name: self._field(name, value.shape, str(value.dtype)) for name, value in first.items()}
        self.identity: list[Any] = [self._names, self.fields, self.padded, self.has_task, drop_last_frames]
        self.identity += [each.tolist() for each in self._steps.values()]
        self._videos = {name: [Video(data.reader, key) for key in each.keys] for name, each in self.cameras.items()}

    def _steps_of(self, name: str, offsets: Sequence[float]) -> Int64:
        """Offsets in seconds as numbers of rows."""
        fps = self.data.fps
        steps = [round(offset * fps) for offset in offsets]
        wrong = [x for x, step in zip(offsets, steps, strict=True) if abs(x * fps - step) / fps > self._tolerance_s]
        if wrong or not steps:
            what = f"{wrong} are no" if wrong else "there are none: pass"
            raise ValueError(f"Episodes(windows=): offsets of {name!r}: {what} multiples of 1 / {fps:g} s, a row")
        return np.array(steps, np.int64)

    def _field(self, name: str, shape: tuple[int, ...], dtype: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a field. LeRobot gives one frame without the dimension of a window, one row with it."""
        count = len(self._steps.get(name, ()))
        return (count, *shape) if count > (dtype == "uint8") else shape, dtype

    def place(self, indices: Int64) -> tuple[Int64, Int64]:
        """Return the episode of each moment, counted among the chosen ones, and its row in that."""
        episodes = np.searchsorted(self.starts, indices, side="right") - 1
        return episodes, indices - self.starts[episodes]

    def _window(self, name: str, episodes: Int64, rows: Int64) -> tuple[Int64, Any]:
        """The rows of a field for each moment, and whether the window is beyond the episode: its first or last row."""
        firsts = self._rows[episodes]
        if name not in self._steps:
            return firsts + rows, None
        wanted = (firsts + rows)[:, None] + self._steps[name]
        found = np.clip(wanted, firsts[:, None], self._rows[episodes + 1, None] - 1)
        return found, found != wanted

    def take(self, indices: Int64) -> dict[str, NDArray[Any]]:
        """Return all fields of moments except frames, [N, ...]; the task as its number."""
        places = self.place(indices)
        at = {name: self._window(name, *places) for name in (*self._names, *self.padded, "task")}
        found = {name: np.take(self._columns[old], at[name][0], axis=0) for name, old in self._names.items()}
        for name, value in self.fill.items():
            window = value if self.fields[name][0] == value.shape else value[None]
            found[name] = np.broadcast_to(window, (len(indices), *self.fields[name][0])).copy()
        found |= {f"{name}_is_pad": at[name][1] | (name in self.fill) for name in self.padded}
        return found | ({"task": self._columns["task_index"][at["task"][0]]} if self.has_task else {})

    def statistics(self) -> dict[str, dict[str, NDArray[np.float32]]]:
        """Mean, standard deviation, least and greatest value of the columns, over the rows."""
        found = {}
        for name, old in self._names.items():
            values = self._columns[old].astype(np.float64)
            each = {kind: getattr(values, kind)(axis=0) for kind in ("mean", "std", "min", "max")}
            found[name] = {statistic: np.asarray(value, np.float32) for statistic, value in each.items()}
        return found

    def frames(self, indices: Int64) -> list[dict[str, Frames]]:
        """Return the frames of moments by camera."""
        found: list[dict[str, Frames]] = [{} for _ in indices]
        places = self.place(indices)
        episodes = self.episodes[places[0]]
        for name, camera in self.cameras.items():
            rows = self._window(name, *places)[0].reshape(len(indices), -1)
            times = camera.starts[episodes, None] + self._columns["timestamp"][rows]
            for moment, file, seconds in zip(found, camera.files[episodes].tolist(), times, strict=True):
                video = self._videos[name][file] if file >= 0 else None
                moment[name] = Frames(video, seconds, camera.size, self._tolerance_s)
        return found

    def runs(self, rows: int, decoded_bytes: int) -> Int64:
        """Return the first moment of each run, whose frames are decoded together."""
        group = max([camera.group for camera in self.cameras.values()], default=1)
        row_bytes = sum(3 * height * width // 2 for height, width in (each.size for each in self.cameras.values()))
        steps = [step for name in self.cameras for step in self._steps.get(name, ())]
        # The windows of a run reach into groups before and behind it.
        reach = sum(-(-max(step, 0) // group) * group for step in (-min(steps, default=0), max(steps, default=0)))
        rows = min(rows, max(decoded_bytes // (RUNS * max(row_bytes, 1)) - reach, group))
        rows -= rows % group if rows >= group else 0  # ends before a key frame
        return np.concatenate([np.arange(*each, rows) for each in zip(self.starts, self.starts[1:], strict=False)])
