"""A small forecast model learns from weather in Zarr: four fields six hours apart give the field a day later.

The script generates three years of temperatures on a sphere of 32 x 64 points: smooth fields that winds carry around
it, with noise. Each year is a Zarr array of packed 16-bit numbers, as reanalyses have them. A convolutional network
learns from two of the years, which are joined, in windows around each time. It is compared with persistence, the
forecast that nothing changes, on the third year. Needs `pip install "aiofeed[arrays]"`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import zarr
from torch import nn

import aiofeed

LATITUDES, LONGITUDES, TIMES, LEAD = 32, 64, 1460, 4
BATCH_SIZE, CHANNELS = 32, 16


def smooth_noise(numbers: np.random.Generator) -> np.ndarray:
    """Return random numbers that change slowly from point to point, with a deviation of 1."""
    down, across = np.fft.fftfreq(LATITUDES)[:, None] * 16, np.fft.rfftfreq(LONGITUDES)[None] * 16
    spectrum = np.fft.rfft2(numbers.standard_normal((LATITUDES, LONGITUDES))) / (1 + down**2 + across**2) ** 1.5
    field = np.fft.irfft2(spectrum, (LATITUDES, LONGITUDES))
    return np.asarray(field / field.std())


def write_year(path: Path, field: np.ndarray, numbers: np.random.Generator) -> np.ndarray:
    """Write a year of temperatures that begins with a field; return the last one.

    Winds, which differ from latitude to latitude, move the field of a time to that of the next one.
    """
    wind = 0.3 + 0.7 * np.cos(np.linspace(-3, 3, LATITUDES))[:, None]  # in points for each step of time
    shift = np.exp(-2j * np.pi * np.fft.rfftfreq(LONGITUDES)[None] * wind)
    fields = np.empty((TIMES, LATITUDES, LONGITUDES), np.int16)
    for at in range(TIMES):
        field = np.fft.irfft(np.fft.rfft(field, axis=1) * shift, LONGITUDES, 1)
        field = 0.995 * field + 0.1 * smooth_noise(numbers)
        fields[at] = np.rint(field * 1000)
    zarr.open_group(path, mode="w").create_array(
        "t2m",
        data=fields,
        chunks=(64, LATITUDES, LONGITUDES),
        dimension_names=("time", "latitude", "longitude"),
        attributes={"scale_factor": 0.01, "add_offset": 280.0, "units": "K"},
    )
    return field


def samples(years: Path) -> aiofeed.Arrays:
    """Return the samples of the years that a path with braces names."""
    arrays = {"x": f"{years}/t2m", "y": f"{years}/t2m"}
    return aiofeed.Arrays(arrays, sample="time", window={"x": range(-3, 1), "y": LEAD})


class Forecast(nn.Module):
    """Returns the field at the end of the lead, in kelvin, of four fields [N, 4, latitudes, longitudes]."""

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.mean, self.std = mean, std
        widths = (4, CHANNELS, CHANNELS, CHANNELS, 1)
        layers: list[nn.Module] = []
        for size, following in pairwise(widths):
            around = nn.Sequential(nn.CircularPad2d((2, 2, 0, 0)), nn.ZeroPad2d((0, 0, 2, 2)))
            layers += [around, nn.Conv2d(size, following, 3, dilation=2), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = self.layers((x - self.mean).float() / self.std)[:, 0]
        return x[:, -1] + change * self.std


def error(forecast: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the sum of squared errors."""
    return float(((forecast - truth) ** 2).mean((1, 2)).sum())


def test(model: Forecast, feeder: aiofeed.Feeder[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """Return the root mean square errors of the model and of persistence."""
    sums, count = [0.0, 0.0], 0
    with torch.no_grad():
        for batch in feeder:
            sums[0] += error(model(batch["x"]), batch["y"])
            sums[1] += error(batch["x"][:, -1], batch["y"])
            count += len(batch["y"])
    return (sums[0] / count) ** 0.5, (sums[1] / count) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the other core loads data
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        numbers = np.random.default_rng(0)
        field = smooth_noise(numbers)
        for year in (2021, 2022, 2023):
            field = write_year(Path(name, f"{year}.zarr"), field, numbers)
        years = samples(Path(name, "{2021..2022}.zarr"))
        print(f"{years}, the first one {years.key(0)}")
        found = years.statistics(200)["x"]
        model = Forecast(float(found["mean"]), float(found["std"]))
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        others = aiofeed.Feeder(samples(Path(name, "2023.zarr")), batch_size=BATCH_SIZE)
        with aiofeed.Feeder(years, batch_size=BATCH_SIZE, shuffle="window") as feeder, others:
            for epoch in range(options.epochs):
                started, losses = time.perf_counter(), []
                for batch in feeder:
                    loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                seconds = time.perf_counter() - started
                ours, persistence = test(model, others)
                print(
                    f"epoch {epoch}: {len(years) / seconds:.0f} samples/s, loss {losses[0]:.1f} to {losses[-1]:.1f}; "
                    f"error in the other year {ours:.2f} K, of persistence {persistence:.2f} K"
                )


if __name__ == "__main__":
    main()
