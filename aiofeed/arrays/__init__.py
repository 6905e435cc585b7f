"""Chunked arrays: windows of Zarr, HDF5 and NetCDF, rows of sparse matrices."""

from importlib.util import find_spec

for _package in ("h5py", "imagecodecs", "numcodecs", "zarr"):
    if find_spec(_package) is None:
        raise ImportError(f'aiofeed.Arrays needs {_package}: pip install "aiofeed[arrays]"')
