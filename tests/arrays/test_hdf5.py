"""``Arrays`` of HDF5: every dtype, filter, layout and border equals what h5py reads, bit by bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arrays import Asked, check_epoch, numbers, selections
from tests.support.hdf5_files import layouts

h5py = pytest.importorskip("h5py")

ORDERS = (False, True, "window:2")


@settings(max_examples=100, report_multiple_bugs=False)
@given(st.data())
def test_windows_equal_h5py(data: Any) -> None:
    """Whatever the window, the layout, the filters, the missing chunks and the order."""
    asked: Asked = data.draw(selections(["x", "y"]))
    with tempfile.TemporaryDirectory() as folder:
        given_arrays, values, path = {}, {}, Path(folder, "f.h5")
        block, version = data.draw(st.sampled_from([0, 512])), data.draw(st.sampled_from([None, "latest"]))
        with h5py.File(path, "w", userblock_size=block, libver=version) as file:
            group = file.create_group("g")
            for name in ("x", "y"):
                least = max([0, *asked.windows.get(name, ())])
                axes = data.draw(st.integers(least + 1, len(asked.sizes)))
                shape = [*list(asked.sizes.values())[:axes]]
                layout = data.draw(layouts(shape))
                values[name] = layout.write(group, name, numbers(shape, layout.dtype))
                given_arrays[name] = f"{path}::g/{name}"
        check_epoch(asked, given_arrays, values, shuffle=data.draw(st.sampled_from(ORDERS)))
