"""What to write in place of arguments and names that users of torch and of other loaders try first."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import aiofeed
from aiofeed.kernel.core.failures import FailurePolicy
from aiofeed.kernel.core.formatting import brief
from aiofeed.kernel.core.limits import Limits


def _threads_instead(workers: object) -> str:
    if workers == 0:
        return "leave it out; reading and decoding run in threads"
    return (
        f"aiofeed.DataLoader takes it. For a Feeder, reading and decoding run in threads, limited by "
        f'Limits(decode_threads=...); engine="process:{workers}" uses that many worker processes; '
        f"pass a thread-safe Dataset as FromDataset(dataset, threads={workers})"
    )


def _part_of(argument: str, kind: type[Any], name: str) -> Callable[[Any], str]:
    return lambda value: f"pass {argument}={kind.__name__}({name}={value!r})"


_NO_WORKERS = "there are no worker processes"
_WAYS: Mapping[str, str | Callable[[Any], str]] = {
    "num_workers": _threads_instead,
    "pin_memory": "memory is pinned if device= is an accelerator; aiofeed.DataLoader takes pin_memory=",
    "pin_memory_device": "pass device=",
    "prefetch_factor": lambda n: "leave it out" if n is None else f"pass limits=Limits(prefetch_batches={n})",
    "persistent_workers": "threads live as long as the feeder",
    "worker_init_fn": (
        f"aiofeed.DataLoader takes it. For a Feeder, {_NO_WORKERS}: FromDataset(dataset, setup=function) calls "
        f"function(dataset) in each thread that will call the dataset; the decoder's `rng` gives each sample its own "
        f"random numbers"
    ),
    "multiprocessing_context": f"{_NO_WORKERS}; aiofeed.DataLoader takes it",
    "timeout": lambda s: "leave it out" if s == 0 else f"pass on_error=FailurePolicy(read_timeout_s={s})",
    "generator": "aiofeed.DataLoader takes it. For a Feeder, pass seed=",
    "dataset": "it is the first argument",
    **dict.fromkeys(("rank", "world_size", "num_replicas"), "pass shard=(rank, world_size)"),
    **dict.fromkeys(
        ("epochs", "num_epochs", "n_epochs", "repeat"), "iterate feeder.epochs(n); iter(feeder) is one epoch"
    ),
    **dict.fromkeys(("steps", "max_steps", "num_batches", "infinite"), "iterate feeder.steps(n), over as many epochs"),
    **dict.fromkeys(("progress", "progress_bar", "verbose"), "iterate feeder.progress()"),
    **dict.fromkeys(("filter", "filters", "filter_fn"), "exclude= leaves samples out; a source takes source[indices]"),
    **dict.fromkeys(("return_paths", "with_paths", "return_index", "with_index", "return_keys"), "pass keys=True"),
    **dict.fromkeys(("buffer_size", "shuffle_buffer", "shuffle_buffer_size"), "shuffle=True shuffles all samples"),
    **dict.fromkeys(("augment", "map", "preprocess", "tokenizer"), "decode= makes samples, transform= changes batches"),
    **dict.fromkeys(("drop_remainder", "drop_incomplete", "pad_last_batch"), "pass drop_last= or pad="),
    **dict.fromkeys(("gpu", "cuda", "use_gpu"), "pass device="),
    **dict.fromkeys(("root", "url", "urls", "x", "y", "labels", "columns"), "the source has it, the first argument"),
    **dict.fromkeys(
        ("lengths", "max_tokens", "boundaries", "group_by_length", "bucket_by", "length_column"),
        "pass batch_size=Buckets(...) or TokenBudget(...)",
    ),
    **dict.fromkeys(("handler", "ignore_errors", "skip_errors"), 'pass on_error="skip"'),
    **dict.fromkeys(("deterministic", "random_state", "reshuffle_each_iteration"), "seed= gives each epoch its order"),
    **dict.fromkeys(("resume", "checkpoint", "state_dict"), "call feeder.load_state_dict(state)"),
    **dict.fromkeys(("distributed", "local_rank"), "the rank comes from torch.distributed, or from shard="),
    **dict.fromkeys(("split", "max_samples", "subset"), "pass a part: source.split(...), source[:1000]"),
    **dict.fromkeys(
        ("balance", "class_weights", "sample_weight", "sample_weights"), "weights= has a number for each sample"
    ),
    **dict.fromkeys(("log", "logger", "callbacks"), "see feeder.statistics(), aiofeed.exporters and AIOFEED_LOG=debug"),
    **dict.fromkeys(("cache_dir", "cache_limit", "max_cache_size", "keep_in_memory"), "pass cache="),
    **dict.fromkeys(("padding", "padding_value", "pad_token_id"), "pass collate_fn=pad_collate(...)"),
    **dict.fromkeys(("num_proc", "worker_count", "num_parallel_calls"), _threads_instead),
    **dict.fromkeys(("shuffle_seed", "shuffle_algo", "shuffle_block_size", "detshuffle"), "pass shuffle= and seed="),
    **dict.fromkeys(("train", "val_split", "train_ratio", "test_size", "nrows"), "pass a part: source.split(...)"),
    **dict.fromkeys(("usecols", "names", "sep", "index_col", "remove_columns"), "aiofeed.Table chooses columns"),
    **dict.fromkeys(("streams", "local", "remote", "input_dir", "serializer", "item_loader"), "the source has it"),
    **dict.fromkeys(("nodesplitter", "workersplitter", "shard_options", "resampled"), "pass shard= and weights="),
    **dict.fromkeys(("normalize", "target_transform", "batched", "operations"), "pass decode= or transform="),
    **dict.fromkeys(("dtype", "fp16", "channels_last"), "pass transform=, which gets each batch"),
    "num_threads": _part_of("limits", Limits, "decode_threads"),
    **{each.name: _part_of("limits", Limits, each.name) for each in fields(Limits)},
    **{each.name: _part_of("on_error", FailurePolicy, each.name) for each in fields(FailurePolicy)},
}


# The arguments of torch's ``DataLoader`` after the dataset.
_POSITIONS = (
    *("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory", "drop_last"),
    *("timeout", "worker_init_fn", "multiprocessing_context", "generator"),
)
_MIXTURE = "aiofeed.Mixture takes several sources"
# What to write in place of names, by their owner.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "Feeder": {
        "sampler batch_sampler epoch "
        "current_epoch with_epoch": "a Feeder shuffles and shards by itself; feeder.set_epoch(n) chooses the epoch",
        "num_workers pin_memory prefetch_factor generator persistent_workers worker_init_fn timeout seed rank "
        "world_size": "pass limits=, device=, seed= and shard= to Feeder",
        "epoch_size with_length num_batches num_samples n_samples n_batches steps_per_epoch num_rows length size "
        "shape cardinality": "len(feeder) is the number of batches, len(feeder.dataset) of samples",
        "keys paths filenames file_names names": "Feeder(keys=True) returns (batch, keys)",
        "source data element_spec "
        "classes class_to_idx targets labels columns column_names features": "feeder.dataset is the source",
        "errors failures skipped failed stats metrics get_stats profile "
        "timings summary describe info report plot": "feeder.statistics() and feeder.explain() say where the time goes",
        "get_state set_state save "
        "load restore checkpoint resume save_state load_state": "feeder.state_dict() and feeder.load_state_dict(state)",
        "stop shutdown reset start join cancel terminate": "call feeder.close(); iter(feeder) begins an epoch",
        "peek iterrows enumerate show get get_batch next take repeat head sample first iterator get_iterator "
        "as_numpy_iterator iter_batches": "next(iter(feeder)) is a batch; see feeder.epochs(n), feeder.steps(n)",
        "split random_split train_test_split": "split the source: source.split(...), source[indices]",
        "map filter shuffle batch to apply shard unbatch with_format prefetch cache select sort window interleave "
        "zip transform with_transform set_transform cuda cpu device collate_fn drop_last decode in_order concat skip "
        "rename rebatch padded_batch to_tuple device_put set_shuffle "
        "set_batch_size dtype": "pass transform=, exclude=, shuffle=, batch_size=, device= and others to Feeder",
    },
    "a source": {
        "map filter select take skip shuffle batch shard random_split train_test_split transform transforms window "
        "target_transform with_transform set_transform with_format apply unbatch repeat prefetch cache sort head tail "
        "sample iloc loc": "Feeder has decode=, shuffle=, batch_size= and shard=, a source source[indices] and split()",
        "concat concatenate interleave zip merge": _MIXTURE,
        "drop dropna fillna astype unique flatten to_dict class_encode_column rename_column remove_columns "
        "cast_column groupby describe to_pandas add_column": "change the data set before it becomes a source",
        "num_rows num_samples length size shape": "len(source) is the number of samples",
        "set_epoch state_dict load_state_dict num_workers stats": "a Feeder has it",
    },
    "aiofeed": {
        "from_pandas from_polars from_arrow from_csv from_parquet from_json from_dict from_list read_csv read_json "
        "read_parquet read_feather read_table scan_parquet load_dataset load_from_disk DataFrame Series read_sql "
        "from_huggingface CsvDataset read_excel make_csv_dataset CSVDataset JSONLinesDataset DatasetDict "
        "ParquetDataset": "aiofeed.Table takes frames, Arrow tables, datasets, Parquet files",
        "from_generator from_text TextLineDataset": "aiofeed.Stream takes a generator function",
        "ConcatDataset ChainDataset concatenate_datasets interleave_datasets sample_from_datasets concatenate zip "
        "choose_from_datasets CombinedStreamingDataset ParallelStreamingDataset interleave concat BlendedDataset "
        "RandomMix": _MIXTURE,
        "random_split Subset SubsetRandomSampler train_test_split": "source.split(...) and source[rows] return parts",
        "map apply batch shuffle take repeat filter select skip unbatch "
        "window sort shard with_format with_transform": "Feeder(source, decode=, batch_size=, shuffle=) makes batches",
        "LengthGroupedSampler BucketBatchSampler DynamicBatchSampler padded_batch bucket_by_sequence_length "
        "pad_sequence "
        "DataCollatorWithPadding": "pass batch_size=aiofeed.Buckets(...), collate_fn=aiofeed.pad_collate() to Feeder",
        "default_collate "
        "collate collate_fn Collator DataCollator": "pass collate_fn= to Feeder; without it batches are those of torch",
        "Loader DataPipe IterDataPipe MapDataPipe Pipeline WebLoader StreamingDataLoader DataIterator DataModule "
        "LightningDataModule": "aiofeed.Feeder reads sources, aiofeed.DataLoader takes the arguments of torch's",
        "ResampledShards WebPipeline WebDataset TarDataset read_webdataset ShardList SimpleShardList "
        "tarfile_to_samples split_by_worker": "aiofeed.TarShards reads tar files",
        "CIFAR100 FashionMNIST SVHN STL10 CelebA FakeData LocalDataset Dataset IterableDataset MapDataset "
        "IterDataset from_torch ImageNet CIFAR10 MNIST CocoDetection "
        "VOCDetection DataSource": "Feeder takes both; aiofeed.FromDataset and aiofeed.Stream have options for them",
        "TensorDataset StackDataset from_numpy from_tensor_slices from_tensors": "aiofeed.Tensors takes tensors",
        "DatasetFolder list_files read_images image_dataset_from_directory VisionDataset Flowers102 Food101 "
        "OxfordIIITPet": "aiofeed.ImageFolder and aiofeed.Files read files",
        "VideoReader VideoClips Kinetics Kinetics400 UCF101 Video read_video VideoDecoder EncodedVideo "
        "LabeledVideoDataset UniformClipSampler RandomClipSampler": "aiofeed.Clips reads videos",
        "torchaudio LIBRISPEECH "
        "YESNO SPEECHCOMMANDS Audio load_audio AudioDecoder Resample": "see aiofeed.DecodeAudio, AudioFolder",
        "Spectrogram MelSpectrogram Normalize": "transform= of Feeder gets batches: torchaudio and torchvision do that",
        "open_zarr open_dataset open_mfdataset read_zarr ZarrDataset H5Dataset "
        "HDF5Dataset NetCDF BatchGenerator": "aiofeed.Arrays({'x': 'era5.zarr/t2m'}) reads Zarr, HDF5 and NetCDF",
        "PrefetchedLoader CudaPrefetcher PrefetchLoader BackgroundGenerator DataPrefetcher ThreadedLoader "
        "AsyncLoader prefetch_to_device": "aiofeed.prefetch(loader, device=) makes batches of any loader ahead",
        "transforms "
        "Compose Resize RandomCrop read_image decode_jpeg": "see aiofeed.DecodeImage(size=, crop=, flip=, augment=)",
        "DistributedSampler WeightedRandomSampler RandomSampler BatchSampler Sampler IndexSampler ShardOptions "
        "DistributedBatchSampler "
        "SequentialSampler split_dataset_by_node split_by_node": "pass shuffle=, shard= or weights= to Feeder",
        "StatefulDataLoader": "aiofeed.DataLoader has state_dict() and load_state_dict()",
        "StreamingDataset "
        "TFRecordDataset read_tfrecords": "aiofeed.MDSShards, LitDataShards and TFRecordShards read shards",
        "ShardWriter MDSWriter optimize": "aiofeed reads shards that other packages write",
        "AnnLoader AnnDataset AnnDataLoader AnnCollection AnnData read_h5ad "
        "read_10x_h5 Collection": "aiofeed.Arrays({'x': 'cells.h5ad', 'y': 'cells.h5ad::obs/cell_type'}) reads cells",
        "TokensLoader IndexedDataset MMapIndexedDataset GPTDataset": "aiofeed.Tokens reads files of tokens",
        "PackedDataset SequencePacking ConstantLengthDataset": "pass batch_size=aiofeed.Pack(...) to Feeder",
        "set_epoch stats epochs": "see feeder.set_epoch(n), feeder.statistics(), feeder.epochs(n)",
        "num_workers AUTOTUNE Options ReadOptions MultiprocessingOptions "
        "get_worker_info seed set_seed cache": "pass limits=, engine=, seed= or cache= to Feeder",
    },
}
# Sources of paths, by their ends.
_PATHS: Mapping[tuple[str, ...], str] = {
    (".parquet", ".arrow", ".feather", ".lance"): "Table({!r})",
    (".tar", ".tar.gz", ".tgz"): "TarShards({!r})",
    (".zip",): "ZipShards({!r})",
    (".tfrecord", ".tfrecords"): "TFRecordShards({!r})",
    (".h5", ".hdf5", ".nc", ".zarr", ".h5ad"): 'Arrays({{"x": {!r}}})',
    (".bin",): "Tokens({!r}, ...)",
    (".mp4", ".mkv", ".avi", ".webm", ".mov"): "Clips(aiofeed.Files([{!r}]), ...)",
    (".csv", ".tsv", ".json", ".jsonl", ".txt"): "Manifest({0!r}) of paths, or aiofeed.Table({0!r}) of values",
    (".jpg", ".jpeg", ".png", ".npy", ".wav", ".flac"): "Files([{!r}])",
}


def hint_at(owner: str, name: Any) -> Any:
    """Return what to write in place of an attribute of ``owner`` that others have.

    Or of an object as a "source", or of arguments of ``Feeder`` by "positions"; for "arguments" all, by their names.
    """
    if owner == "arguments":
        return _WAYS
    if owner == "source":
        return _instead_of(name)
    if owner == "positions":
        return _by_name(name)
    for names, way in _NAMES[owner].items():
        if name in names.split():
            return f": {way}"
    public = {each.lower(): each for each in dir(aiofeed)} if owner == "aiofeed" else {}
    near = difflib.get_close_matches(name.lower(), public, n=1, cutoff=0.8)
    return f"; did you mean aiofeed.{public[near[0]]}?" if near else ""


def _by_name(arguments: Sequence[Any]) -> str:
    """Return the call of ``Feeder`` that ``DataLoader``'s arguments by position mean."""
    # A function in the place of the batch size is a decoder.
    names = [*["decode"][: callable(arguments[0])], *_POSITIONS]
    named = ", ".join(f"{name}={brief(value)}" for name, value in zip(names, arguments, strict=False))
    return f"Feeder(..., {named}); aiofeed.DataLoader takes them by position, as torch's DataLoader does"


def _instead_of(source: Any) -> str:
    """Return the message about an object that is no source, with what to pass in its place; empty if it may be one."""
    kind = type(source).__name__
    if isinstance(source, str | bytes | os.PathLike):
        path = os.fspath(source)
        end = os.fsdecode(path).lower().rstrip("/")
        call = next((call for ends, call in _PATHS.items() if end.endswith(ends)), "ImageFolder({!r})")
        return f"a source is an object, got the path {path!r}; did you mean aiofeed.{call.format(path)}?"
    if isinstance(source, Mapping) and _has_names(source):
        return (
            f"a feeder asks a source for samples 0, 1, ..., and this {kind} has the keys {list(source)[:8]}: pass one "
            f"of its values, or for a dict of tensors aiofeed.Tensors(*tensors.values())"
        )
    if isinstance(source, tuple) and len(source) > 1 and _are_columns(source):
        return (
            f"a tuple of {len(source)} tensors of {len(source[0])} rows each: pass aiofeed.Tensors(x, y, ...), or a "
            f"list if each tensor is a sample"
        )
    if type(source).__module__.partition(".")[0] in ("pyarrow", "polars"):
        return f"an item of a {kind} is a column, not a row: pass aiofeed.Table(table)"
    if hasattr(type(source), "iloc"):
        return (
            f"a pandas {kind} is indexed by its index, not by position: pass aiofeed.Table(frame), or "
            f'aiofeed.Files(frame["path"], frame["label"])'
        )
    if kind in ("DataLoader", "StatefulDataLoader", "Feeder") and hasattr(source, "batch_size"):
        return f"a {kind} yields batches, not samples: pass its dataset, or use aiofeed.prefetch(loader, device=...)"
    return ""


def _are_columns(values: tuple[Any, ...]) -> bool:
    """Return whether all values are tensors or arrays with the same number of rows."""
    rows = {value.shape[0] if getattr(value, "ndim", 0) else None for value in values}
    return len(rows) == 1 and None not in rows


def _has_names(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a mapping has no samples 0, 1, ...; a TensorDict, unlike a dict, has rows that are not keys."""
    return 0 not in mapping if isinstance(mapping, dict) else isinstance(next(iter(mapping), None), str)
