"""Tests of the arithmetic of crops, scales and their random numbers."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiofeed.kernel.decoders.geometry import center_box, draft_size, jpeg_factor, random_box, scaled_box
from aiofeed.kernel.sampling.order import SplitMix64

SIDES = st.integers(1, 65_535)


def torchvision_crop(width, height, scale, ratio, rng):
    """torchvision's RandomResizedCrop.get_params, written from its documentation, with Python's generator."""
    area = width * height
    for _ in range(10):
        target_area = area * rng.uniform(*scale)
        aspect_ratio = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w = round(math.sqrt(target_area * aspect_ratio))
        h = round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            i = rng.randrange(height - h + 1)
            j = rng.randrange(width - w + 1)
            return j, i, w, h
    in_ratio = width / height
    if in_ratio < ratio[0]:
        w, h = width, round(width / ratio[0])
    elif in_ratio > ratio[1]:
        h, w = height, round(height * ratio[1])
    else:
        w, h = width, height
    return (width - w) // 2, (height - h) // 2, w, h


def distance(a, b):
    """The two-sample Kolmogorov-Smirnov statistic."""
    both = np.sort(np.concatenate([a, b]))
    below = [np.searchsorted(np.sort(x), both, side="right") / len(x) for x in (a, b)]
    return np.abs(below[0] - below[1]).max()


def test_splitmix64_is_the_published_generator():
    """From state 0 the outputs equal those of the reference implementation."""
    numbers = SplitMix64(0)
    assert numbers._state == 0
    reference = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [numbers.random() for _ in range(3)] == [(z >> 11) / 2**53 for z in reference]


@given(st.integers(0, 2**64 - 1))
def test_neighbouring_seeds_give_unrelated_streams(seed):
    """Seeds that differ by one, or by the generator's own increment, share no numbers."""
    streams = []
    for other in (seed, seed + 1, seed + 0x9E3779B97F4A7C15):
        numbers = SplitMix64(other)
        streams.append({numbers.random() for _ in range(20)})
    assert len(set.union(*streams)) == 60


def test_first_numbers_over_consecutive_seeds_are_uniform():
    """Over seeds 0 to 9,999 each of the first five numbers is uniform, and neighbours are uncorrelated."""
    numbers = np.array([[s.random() for _ in range(5)] for s in map(SplitMix64, range(10_000))])
    assert 0 <= numbers.min() <= numbers.max() < 1
    for column in numbers.T:
        assert distance(column, (np.arange(10_000) + 0.5) / 10_000) < 0.025
        assert abs(np.corrcoef(column[1:], column[:-1])[0, 1]) < 0.04


@pytest.mark.parametrize(
    ("width", "height", "size", "resize", "box"),
    [
        (500, 400, 400, 400, (50, 0, 450, 400)),
        (400, 500, 400, 400, (0, 50, 400, 450)),
        (256, 256, 224, 256, (16, 16, 240, 240)),
        (5, 4, 4, 4, (0, 0, 4, 4)),  # the half of an odd margin rounds to even: round(0.5) is 0
        (7, 4, 4, 4, (2, 0, 6, 4)),  # and round(1.5) is 2
        (301, 200, 100, 100, (25 * 301 / 150, 0, 125 * 301 / 150, 200)),  # int(150.5) is 150
    ],
)
def test_center_box_follows_torchvision(width, height, size, resize, box):
    """The long side is truncated to an integer and the crop's corner rounded half to even, as by torchvision."""
    assert center_box(width, height, size, resize) == pytest.approx(box, abs=1e-9)


@given(SIDES, SIDES, st.integers(1, 1024), st.integers(0, 512))
def test_center_box_stays_inside(width, height, size, more):
    """The box lies inside the picture, for every picture, size and resize."""
    left, upper, right, lower = center_box(width, height, size, size + more)
    assert 0 <= left < right <= width
    assert 0 <= upper < lower <= height


@given(SIDES, SIDES, st.integers(1, 1024))
def test_center_box_without_a_larger_resize_keeps_the_short_side_whole(width, height, size):
    """With resize equal to size the box spans exactly the shorter side."""
    left, upper, right, lower = center_box(width, height, size, size)
    assert (left, right) == (0, width) if width <= height else (upper, lower) == (0, height)


@given(
    SIDES,
    SIDES,
    st.tuples(st.floats(1e-6, 1), st.floats(1e-6, 1)).map(sorted),
    st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)).map(sorted),
    st.integers(0, 2**64 - 1),
)
def test_random_box_is_whole_pixels_inside(width, height, scale, ratio, seed):
    """For all bounds a random crop consists of whole pixels, at least one, inside the picture."""
    box = random_box(width, height, tuple(scale), tuple(ratio), SplitMix64(seed))
    left, upper, right, lower = box
    assert all(isinstance(side, int) for side in box)
    assert 0 <= left < right <= width
    assert 0 <= upper < lower <= height


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (1000, 100), (33, 21)])
def test_random_crops_are_distributed_as_torchvisions(width, height):
    """Width, height, left and upper of 4,000 crops have the distribution of torchvision's algorithm."""
    n, scale, ratio = 4_000, (0.08, 1.0), (3 / 4, 4 / 3)
    rng = random.Random(0)
    expected = np.array([torchvision_crop(width, height, scale, ratio, rng) for _ in range(n)], float)
    boxes = np.array([random_box(width, height, scale, ratio, SplitMix64(seed)) for seed in range(n)], float)
    ours = np.stack([boxes[:, 0], boxes[:, 1], boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]], axis=1)
    for a, b in zip(ours.T, expected.T, strict=True):
        assert distance(a, b) < 1.95 * math.sqrt(2 / n)  # 0.1 % of pairs from one distribution exceed this


class Lowest:
    """Random numbers that make every attempt as narrow as the ratio allows; with scale 1 none of them fits."""

    def random(self):
        return 0.0


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [
        (10, 1000, (0, 493, 10, 506)),  # too narrow: the height is the width over 3/4
        (1000, 10, (493, 0, 506, 10)),  # too wide: the width is the height times 4/3
        (1, 1000, (0, 499, 1, 500)),
        (400, 420, (0, 0, 400, 420)),  # within the ratio: the whole picture
    ],
)
def test_random_box_falls_back_to_the_centre(width, height, box):
    """If none of ten attempts fits, the crop is the largest central box within the ratio, as torchvision's."""
    assert random_box(width, height, (1.0, 1.0), (3 / 4, 4 / 3), Lowest()) == box


def drafted(width, height, request):
    """The factor that Pillow's JpegImageFile.draft uses for a request."""
    scale = min(width // request[0], height // request[1])
    return next(s for s in (8, 4, 2, 1) if scale >= s)


@given(SIDES, SIDES, st.data())
def test_scaled_decoding_keeps_twice_the_target(width, height, data):
    """The visible part keeps at least twice the target on both axes, and would not at the next smaller scale."""
    left = data.draw(st.integers(0, width - 1))
    upper = data.draw(st.integers(0, height - 1))
    box = (left, upper, data.draw(st.integers(left + 1, width)), data.draw(st.integers(upper + 1, height)))
    # The targets are 1 to 20 times smaller than the box, so that either axis may decide.
    shrinks = st.floats(1, 20)
    target = [max(1, round((box[i + 2] - box[i]) / (2 * data.draw(shrinks)))) for i in (0, 1)]
    factor = jpeg_factor(box, *target)
    if factor > 1:
        assert drafted(width, height, draft_size(width, height, factor)) == factor
        for orientation in range(1, 9):
            shown = scaled_box(box, width, height, factor, orientation)
            assert shown[2] - shown[0] >= 2 * target[0] - 1e-6
            assert shown[3] - shown[1] >= 2 * target[1] - 1e-6
    if factor < 8:
        worse = 2 * factor
        assert (box[2] - box[0]) < 2 * target[0] * worse or (box[3] - box[1]) < 2 * target[1] * worse


@given(SIDES, SIDES, st.sampled_from([1, 2, 4, 8]))
def test_draft_uses_the_requested_factor(width, height, factor):
    """``draft_size`` makes Pillow use exactly the factor, also if it does not divide the size."""
    assume(min(width, height) >= factor)
    assert drafted(width, height, draft_size(width, height, factor)) == factor


@given(SIDES, SIDES, st.sampled_from([1, 2, 4, 8]), st.integers(1, 8))
def test_scaled_box_of_the_whole_stays_inside(width, height, factor, orientation):
    """The whole picture scales to within the decoded size, less than a pixel short at the end that was stored last."""
    decoded = math.ceil(width / factor), math.ceil(height / factor)
    left, upper, right, lower = scaled_box((0, 0, width, height), width, height, factor, orientation)
    assert right - left == pytest.approx(width / factor)
    assert lower - upper == pytest.approx(height / factor)
    # The first column and row of the stored picture are whole pixels; find their edge in the upright picture.
    assert (right == pytest.approx(decoded[0])) if orientation in (2, 3, 6, 7) else (left == 0)
    assert (lower == pytest.approx(decoded[1])) if orientation in (3, 4, 7, 8) else (upper == 0)
    assert 0 <= left < right <= decoded[0]
    assert 0 <= upper < lower <= decoded[1]
