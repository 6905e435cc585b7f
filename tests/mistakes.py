"""Mistakes that users make, and what their messages must say.

`python -m tests.mistakes` makes each one and prints its message, on one page for a person to read. Read the page when
messages change: each should name the object, say what is allowed, and what to write instead.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import aiofeed
from tests.support.simulated_device import SimulatedDevice

# A section, then a mistake in each line, and after "#:" words of its message that show the way out.
MISTAKES = r"""
== The source
Feeder("train", decode=image, batch_size=4) #: did you mean aiofeed.ImageFolder('train')
Feeder(Path("train"), decode=image, batch_size=4) #: did you mean aiofeed.ImageFolder('train')
Feeder(ImageFolder, decode=image, batch_size=4) #: pass an instance
Feeder(DataLoader(numbers), batch_size=4) #: pass its dataset
Feeder(torch.utils.data.DataLoader(numbers), batch_size=4) #: aiofeed.prefetch
Feeder({"x": torch.arange(4)}, batch_size=2) #: aiofeed.Tensors
Feeder((torch.arange(4), torch.arange(4)), batch_size=2) #: aiofeed.Tensors(x, y
Feeder(iter(numbers), batch_size=2) #: aiofeed.Stream
Feeder((n for n in numbers), batch_size=2) #: aiofeed.Stream
Feeder(None, batch_size=2) #: __getitem__
Feeder(3, batch_size=2) #: __getitem__
Feeder(frame, batch_size=2) #: aiofeed.Table
Feeder(["train/a/0.png"], decode=image, batch_size=1) #: aiofeed.Files(paths)
Feeder(NoKey(), decode=image, batch_size=2) #: lacks ['key']
Feeder(torch.utils.data.random_split(folder, [0.5, 0.5])[0], decode=image, batch_size=2) #: source.split(
Feeder(torch.utils.data.ConcatDataset([folder]), decode=image, batch_size=2) #: source
Feeder("train.parquet", batch_size=2) #: did you mean aiofeed.Table('train.parquet')
Feeder("s3://bucket/train-{000..009}.tar.gz", batch_size=2) #: aiofeed.TarShards('s3://bucket
Feeder("train.zarr/", batch_size=2) #: aiofeed.Arrays(
Feeder("a.mp4", batch_size=2) #: aiofeed.Clips(aiofeed.Files(['a.mp4'])
Feeder(fed, batch_size=2) #: pass its dataset
[*aiofeed.DataLoader(fed, batch_size=2)] #: a Feeder is a loader
fed[0] #: next(iter(feeder))
next(fed) #: iter(feeder)
fed.sampler #: feeder.set_epoch(n)
fed.stats #: feeder.statistics()
fed.get_state #: feeder.state_dict()
fed.unbatch #: transform=
fed.steps_per_epoch #: len(feeder)
fed.worker_init_fn #: limits=
fed.class_to_idx #: feeder.dataset
fed.summary #: feeder.explain()
fed.iter_batches #: next(iter(feeder))
fed.train_test_split #: source.split(
fed.world_size #: shard=
folder.map #: decode=
folder.transform #: decode=
folder.iloc #: source[indices]
folder[:2].interleave #: aiofeed.Mixture
aiofeed.Files(["a"]).num_rows #: len(source)
aiofeed.Tensors(torch.arange(4)).set_epoch #: a Feeder has it
aiofeed.Tensors(torch.arange(4)).filter #: source[indices]
folder[:2].shuffle #: shuffle=
aiofeed.from_pandas #: aiofeed.Table
aiofeed.random_split #: source.split(
aiofeed.WebDataset #: aiofeed.TarShards
aiofeed.read_csv #: aiofeed.Table
aiofeed.from_generator #: aiofeed.Stream
aiofeed.sample_from_datasets #: aiofeed.Mixture
aiofeed.bucket_by_sequence_length #: aiofeed.Buckets
aiofeed.MapDataset #: aiofeed.FromDataset
aiofeed.from_tensor_slices #: aiofeed.Tensors
aiofeed.DatasetFolder #: aiofeed.ImageFolder
aiofeed.transforms #: aiofeed.DecodeImage
aiofeed.IndexSampler #: shard=
aiofeed.default_collate #: collate_fn=
aiofeed.unbatch #: batch_size=
aiofeed.set_epoch #: feeder.set_epoch(n)
aiofeed.num_workers #: limits=
aiofeed.StatefulDataLoader #: aiofeed.DataLoader has state_dict
aiofeed.imagefolder #: did you mean aiofeed.ImageFolder
aiofeed.Tensors({"x": torch.arange(4)}) #: Tensors(*tensors.values())
aiofeed.Tensors(frame) #: aiofeed.Table(frame)
aiofeed.Manifest(frame) #: frame["path"]
FailurePolicy("skip", retry=3) #: retries=
Limits(threads=3) #: decode_threads=
folder[3] #: ImageFolder[3:4] is a source
folder[9:][0] #: is a source
folder["a"] #: a slice, a list of ints or a mask
folder[[0.5]] #: a slice, a list of ints or a mask
folder[[99]] #: for 8 samples
folder[[True]] #: the source 8 samples
folder.split([0.9, 0.1]) #: {"train": 0.9, "validation": 0.1}
folder.split({"a": 0.9, "b": 0.2}) #: sum to 1
folder.split({"a": 3, "b": 4}) #: sum to 8
folder.split({"a": 0.99, "b": 0.01}) #: would be empty
folder.split({"a": 0.5, "b": 0.5}, seed="x") #: seed must be an int
folder[:2].paths #: whole
== The arguments of Feeder
Feeder(folder, image, 4) #: Feeder(..., decode=
Feeder(folder, 32, True) #: batch_size=32, shuffle=True
Feeder(folder) #: batch_size
Feeder(folder, decode=image) #: batch_size must be an int
Feeder(folder, batch_size=4) #: aiofeed.DecodeImage(size=224)
Feeder(folder, decode=image, batch_size=0) #: batch_size must be at least 1
Feeder(folder, decode=image, batch_size="4") #: batch_size must be an int
Feeder(folder, decode=image, batch_size=True) #: batch_size must be an int
Feeder(folder, decode=image, batch_size=4.0) #: batch_size must be an int
Feeder(folder, decode=image, batchsize=4) #: did you mean batch_size=
Feeder(folder, decoder=image, batch_size=4) #: did you mean decode=
Feeder(folder, decode=image, batch_size=4, num_workers=4) #: Limits(decode_threads=...)
Feeder(folder, decode=image, batch_size=4, drop_remainder=True) #: drop_last=
Feeder(folder, decode=image, batch_size=4, tokenizer=len) #: decode= makes samples
Feeder(folder, decode=image, batch_size=4, use_gpu=True) #: device=
Feeder(folder, decode=image, batch_size=4, labels=[1]) #: the source has it
Feeder(folder, decode=image, batch_size=4, max_tokens=9) #: TokenBudget(
Feeder(folder, decode=image, batch_size=4, handler=print) #: on_error="skip"
Feeder(folder, decode=image, batch_size=4, random_state=3) #: seed=
Feeder(folder, decode=image, batch_size=4, channels_last=True) #: transform=
Feeder(folder, decode=image, batch_size=4, pin_memory=True) #: device=
Feeder(folder, decode=image, batch_size=4, prefetch_factor=2) #: Limits(prefetch_batches=2)
Feeder(folder, decode=image, batch_size=4, worker_init_fn=print) #: setup=
Feeder(folder, decode=image, batch_size=4, generator=None) #: seed=
Feeder(folder, decode=image, batch_size=4, timeout=5) #: read_timeout_s=5
Feeder(folder, decode=image, batch_size=4, rank=0) #: shard=(rank, world_size)
Feeder(folder, decode=image, batch_size=4, decode_threads=2) #: Limits(decode_threads=2)
Feeder(folder, decode=image, batch_size=4, retries=2) #: FailurePolicy(retries=2)
Feeder(folder, decode=image, batch_size=4, transforms=print) #: did you mean transform=
Feeder(folder, decode=image, batch_size=4, shufle=True) #: did you mean shuffle=
Feeder(folder, decode=image, batch_size=4, shuffle="yes") #: shuffle must be True, False
Feeder(folder, decode=image, batch_size=4, shuffle=None) #: pass False
Feeder(folder, decode=image, batch_size=4, shuffle=1) #: shuffle must be True, False
Feeder(folder, decode=image, batch_size=4, shuffle="window") #: pass shuffle=True
Feeder(folder, decode=image, batch_size=4, seed="a") #: seed must be an int
Feeder(folder, decode=image, batch_size=4, seed=2**63) #: seed must be between
Feeder(folder, decode=image, batch_size=4, drop_last="no") #: drop_last must be True or False
Feeder(folder, decode=image, batch_size=4, pad=1) #: pad must be True or False
Feeder(folder, decode=image, batch_size=4, sampler=[0], shuffle=True) #: leave out shuffle=True
Feeder(folder, decode=image, batch_size=4, batch_sampler=[[0]]) #: leave out batch_size=
Feeder(folder, decode=image, batch_size=4, weights=[1.0]) #: 8
Feeder(folder, decode=image, batch_size=4, weights=[-1.0] * 8) #: weights
Feeder(folder, decode=image, batch_size=4, exclude=3) #: exclude
Feeder(folder, decode=image, batch_size=4, collate_fn=3) #: collate_fn must be callable
Feeder(folder, decode=image, batch_size=4, collate_fn=aiofeed.pad_collate) #: collate_fn=aiofeed.pad_collate()
aiofeed.DataLoader(numbers, collate_fn=aiofeed.pad_collate) #: collate_fn=aiofeed.pad_collate()
list(torch.utils.data.DataLoader([torch.ones(2)], collate_fn=aiofeed.pad_collate)) #: collate_fn=aiofeed.pad_collate()
list(Feeder([torch.ones(1), torch.ones(2)], batch_size=2)) #: aiofeed.pad_collate()
Feeder(folder, decode=image, batch_size=4, transform="flip") #: transform must be callable
Feeder(folder, decode=3, batch_size=4) #: decode must be callable
Feeder(folder, decode=DecodeImage, batch_size=4) #: pass an instance
Feeder(folder, decode=coroutine, batch_size=4) #: ordinary function
Feeder(folder, decode=image, batch_size=4, transform=coroutine) #: ordinary function
Feeder(numbers, decode=image, batch_size=4) #: transform= gets each batch
Feeder(folder, decode=image, batch_size=4, device="gpu") #: device
Feeder(folder, decode=image, batch_size=4, device="cuda:99") #: cuda
Feeder(folder, decode=image, batch_size=4, device=[]) #: device
Feeder(folder, decode=image, batch_size=4, shard=3) #: shard
Feeder(folder, decode=image, batch_size=4, shard=(2, 2)) #: rank
Feeder(folder, decode=image, batch_size=4, in_order="yes") #: in_order must be
Feeder(folder, decode=image, batch_size=4, in_order="samples", engine="process") #: in_order=False
Feeder(folder, decode=image, batch_size=4, engine="processes") #: "process:4" for four processes
Feeder(folder, decode=image, batch_size=4, engine="process:0") #: "process:4" for four processes
Feeder(folder, decode=image, batch_size=4, engine=4) #: "process:4" for four processes
Feeder(folder, decode=image, batch_size=4, limits=8) #: aiofeed.Limits(
Feeder(folder, decode=image, batch_size=4, limits={"decode_threads": 4}) #: aiofeed.Limits(
Feeder(folder, decode=image, batch_size=4, on_error="ignore") #: skip
Feeder(folder, decode=image, batch_size=4, on_error=True) #: skip
Feeder(folder, decode=image, batch_size=3, static_batches=True) #: drop_last=True
Feeder(folder, decode=image, batch_size=4, timeline="x.html") #: timeline must be True or False
== Limits, processes, failures
Limits(num_workers=4) #: decode_threads
Limits(decode_threads=0) #: decode_threads
Limits(decode_threads=2.5) #: Limits(decode_threads=...) must be an int
Limits(prefetch_batches=-1) #: prefetch_batches
Limits(memory_bytes="1GB") #: memory_bytes
Limits(threads=4) #: decode_threads
Processes(0) #: Processes(number=...)
Processes("4") #: Processes(number=...)
FailurePolicy("ignore") #: skip
FailurePolicy("skip", retries=-1) #: retries
FailurePolicy("skip", max_failures=2.5) #: max_failures
FailurePolicy("skip", read_timeout_s=0) #: read_timeout_s
FailurePolicy("skip", timeout=3) #: read_timeout_s
FailurePolicy("skip", retry_on=["timeout"]) #: retry_on
Feeder(folder, decode=image, batch_size=4, engine="process:4", limits=Limits(decode_threads=2)) #: at least 4
== Running a feeder
fed.set_epoch("1") #: epoch
fed.set_epoch(-1) #: epoch
fed.load_state_dict({}) #: state
fed.load_state_dict(3) #: state
fed.load_state_dict({"epoch": 3, "feeder": fed.state_dict(), "model": {}}) #: did you mean state['feeder']?
fed.load_state_dict({"loops": [{"x": 1}, fed.state_dict()]}) #: did you mean state['loops'][1]?
fed.load_state_dict("list.csv") #: load the file first, torch.load('list.csv')
fed.load_state_dict(Path("list.csv")) #: load the file first, torch.load('list.csv')
Feeder(folder, decode=image, batch_size=4, seed=None) #: for another order in each run: seed=random.randrange(2**62)
fed.load_state_dict(Feeder(folder[:4], decode=image, batch_size=4).state_dict()) #: length
fed.load_state_dict(Feeder(folder, decode=image, batch_size=4, seed=1).state_dict()) #: seed
fed.timeline("x.html") #: no batch was read
fed.samples(-1) #: step
list(Feeder(folder, decode=image, batch_size=2, transform=per_sample)) #: decode= gets samples
list(Feeder(FolderPairs("images", "masks"), decode=image, batch_size=2)) #: DecodePair(
list(Feeder(folder, decode=image, batch_size=2, sampler=[99])) #: the source has 8 samples
list(Feeder(folder, decode=image, batch_size=2, sampler=["0"])) #: one int per sample
list(Feeder(Files(["missing.png"]), decode=image, batch_size=1)) #: missing.png
list(Feeder(Files(["text.png"]), decode=image, batch_size=1)) #: text.png
list(Feeder(Files(["empty.png"]), decode=image, batch_size=1)) #: empty.png
list(Feeder([torch.zeros(2), torch.zeros(3)], batch_size=2)) #: aiofeed.pad_collate
list(Feeder(folder, decode=len, batch_size=2, collate_fn=broken)) #: broken on purpose
list(Feeder(folder, decode=broken, batch_size=2, on_error="skip")) #: max_failures
list(aiofeed.prefetch(3)) #: iterable
== A decoder, and other functions
Feeder(folder, decode=two, batch_size=2) #: decode is called with one argument, the bytes of a sample
Feeder(folder, decode=two, batch_size=2, engine="process") #: decode is called with one argument, the bytes of a sample
Feeder(Stream(numbers), decode=two, batch_size=2) #: decode is called with one argument, the bytes of a sample
Feeder(folder, decode=WrongTarget(), batch_size=2) #: unexpected keyword argument 'target'
Feeder(folder, decode=lambda: 3, batch_size=2) #: too many positional arguments
Feeder(folder, decode=generator, batch_size=2) #: use `return` in place of `yield`
Feeder(folder, decode=generates, batch_size=2) #: use `return` in place of `yield`
Feeder(folder, decode=asynchronous_generator, batch_size=2) #: ordinary function
list(Feeder(folder, decode=lambda data: (part for part in data), batch_size=2)) #: use `return` in place of `yield`
list(Feeder(folder, decode=lambda data: None, batch_size=2)) #: is a `return` missing?
list(Feeder(folder, decode=Image.open, batch_size=2)) #: the decoder gets the bytes of a file, not its path
list(Feeder(folder, decode=np.load, batch_size=2)) #: Image.open(io.BytesIO(data))
list(Feeder(folder, decode=Path, batch_size=2)) #: the decoder gets the bytes of a file, not its path
list(Feeder(folder, decode=torch.load, batch_size=2)) #: the decoder gets the bytes of a file, not its path
list(Feeder(Files(["list.csv"]), decode=open, batch_size=1)) #: the decoder gets the bytes of a file, not its path
list(Feeder(folder, decode=lambda data: Image.open("a/" + data), batch_size=1)) #: not its path
list(Feeder(folder, decode=lambda data: Image.new("L", (2, 2)), batch_size=2)) #: one is an Image, a PIL image: convert
list(Feeder(folder, decode=broken, batch_size=1, on_error="skip")) #: more than max_failures=0.01 allows
list(Feeder(Files(["train"]), decode=image, batch_size=1)) #: is a folder: aiofeed.ImageFolder('train')
list(Feeder(Files(["list.csv"] * 2, [0, None]), decode=len, batch_size=2)) #: the target of 'list.csv' is None
list(Feeder(Files(["images/0.png"] * 2, [0, None]), decode=image, batch_size=2)) #: target of 'images/0.png' is None
list(Feeder(TarShards("shards/x.tar"), decode=image, batch_size=2)) #: data='jpg', target='cls' to the source: its
list(Feeder(TarShards("shards/x.tar"), decode=DecodeNumpy(), batch_size=2)) #: data='jpg', target='cls'
pair(image_bytes, target={"boxes": [[9, 5, 4, 9]]}) #: right is less than left: COCO's bbox is left, upper, width
pair(image_bytes, target={"boxes": [[4, 9, 9, 5]]}) #: lower is less than upper: COCO's bbox is left, upper, width
Feeder(folder, decode=image, batch_size=2, transform=two) #: transform is called with one argument, the batch
Feeder(folder, decode=image, batch_size=2, transform=torch.nn.Flatten) #: pass an instance
Feeder(folder, decode=image, batch_size=2, collate_fn=two) #: collate_fn is called with one argument, the samples
Feeder(folder, decode=image, batch_size=2, collate_fn=generator) #: use `return` in place of `yield`
aiofeed.prefetch([1], transform=two) #: transform is called with one argument, the batch
FromDataset(numbers, setup=lambda: 3) #: FromDataset(setup=...) is called with one argument
DecodeImage(16, augment=two) #: augment is called with one argument
DecodePair(image, augment=generator) #: use `return` in place of `yield`
TarShards("shards/x.tar", "jpg", "cls", to_target=two) #: TarShards(to_target=) is called with one argument
== DataLoader
DataLoader(folder) #: aiofeed.Feeder(source, decode=...
DataLoader(folder, decode=image) #: aiofeed.Feeder(source, decode=...
DataLoader(folder[:3]) #: aiofeed.Feeder(source, decode=...
DataLoader(Tensors(torch.arange(3))) #: aiofeed.Feeder(source, decode=...
DataLoader(Stream(numbers)) #: aiofeed.Feeder(source, decode=...
DataLoader(numbers, batchsize=4) #: did you mean batch_size=
DataLoader(numbers, cache="host", num_workers=2) #: threads=2
DataLoader(numbers, cache="disk") #: aiofeed.DiskCache(path)
DataLoader(numbers, cache="x/cache.bin") #: did you mean aiofeed.DiskCache('x/cache.bin')
DataLoader(numbers, batch_size=None, threads=2) #: leave them out
DataLoader(numbers, threads=0) #: threads
DataLoader(numbers, in_order="samples") #: aiofeed.Feeder
DataLoader(numbers, on_error="ignore") #: skip
DataLoader(numbers, device="gpu") #: device
DataLoader(numbers, batch_size=0) #: batch_size
DataLoader(numbers).load_state_dict({}) #: state
DataLoader(numbers).load_state_dict({"loader": DataLoader(numbers).state_dict()}) #: did you mean state['loader']?
DataLoader(numbers).load_state_dict("list.csv") #: load the file first, torch.load('list.csv')
== Files and folders
ImageFolder("~/train") #: os.path.expanduser('~/train')
ImageFolder("C:\\data\\train") #: a path of Windows
ImageFolder("s3:/bucket/train") #: s3://bucket/train
ImageFolder("trian") #: 'trian' does not exist
ImageFolder("train/a/0.png") #: is not a folder
ImageFolder("images") #: class
ImageFolder("train", transform=print) #: decode= of Feeder
ImageFolder("train", loader=print) #: pass decode= to Feeder
ImageFolder("train", options={}) #: are for URLs
ImageFolder("train", follow_symlinks=1) #: must be True or False
ImageFolder("ftp://host/train") #: the scheme must be one of
ImageFolder("s3:///train") #: names no bucket
Files("train") #: ImageFolder reads a folder
Files([3]) #: number 0 is 3
Files(["a"], labels=[1]) #: pass targets=
Files(["a"], decode=image) #: pass it to Feeder
ImageFolder(["train"]) #: Files takes a list of paths
ImageFolder(3) #: the path or URL of a folder
Files([b"a.png"]) #: number 0 is
Files(["a", ("b", "c")]) #: number 1
Files([("a", "b"), ("c",)]) #: tuples of one length
Files(["a"], [1, 2]) #: 2
Files(["a"], {"a": 1}) #: pass [labels[p] for p in paths]
Files(["a", "s3://b/c"]) #: aiofeed.Mixture
Files(["a"], max_bytes=0) #: max_bytes
FolderPairs("images", "mask") #: 'mask' does not exist
FolderPairs("images", "train") #: Files([(image, mask), ...])
FolderPairs("images", "masks", boxes=[1]) #: dict of boxes
FolderPairs("images", "masks", targets=[1]) #: boxes=
Manifest("missing.csv") #: missing.csv
Manifest("~/list.csv") #: os.path.expanduser('~/list.csv')
Manifest("list.csv", target="labels") #: label
Manifest("list.txt") #: format
== Shards, tables and tokens
TarShards("missing.tar") #: missing.tar
TarShards("*.tar") #: *.tar
TarShards("train") #: train/*
TarShards("text.png") #: not a tar file
TarShards("~/x.tar") #: os.path.expanduser('~/x.tar')
TarShards("pipe:aws s3 cp s3://b/x.tar -") #: s3://bucket/key
TarShards([]) #: empty
TarShards(3) #: URLs or paths
ZipShards("text.png") #: text.png
ParquetRows("text.png") #: text.png: this is text, and not a Parquet file
TFRecordShards("text.png") #: text.png
MDSShards("train") #: train
Table(frame, columns="x") #: list of names
Table(frame, columns=["z"]) #: ['x']
Table(frame, target="x") #: no column is left beside target=
Table(frame, data="x", columns=["x"]) #: pass one of them
Table(np.zeros((3, 2))) #: aiofeed.Tensors(array)
Table("missing.parquet") #: missing.parquet
Table({"x": [1]}) #: Table
Table("s3://bucket/a.arrow") #: Arrow files are read from disk only
Tokens("missing.bin", 8) #: missing.bin does not exist
Tokens("~/train.bin", 8) #: os.path.expanduser('~/train.bin')
Tokens("tokens.bin", 0) #: Tokens(block=...)
Tokens("tokens.bin", 1000) #: 100
Tokens("tokens.bin", 8, dtype="float32") #: must be one of
Tokens("tokens.bin", 8, vocab=5) #: vocab
Tokens("tokens.bin", block_size=8) #: it is called block
Tokens([], 8) #: at least one file
Tokens("text.png", 8) #: tokenise it first
Tokens([{"input_ids": [1, 2]}], 8) #: Tokens reads files, got dict in a list. For a dataset of documents: Feeder(Table(
Tokens(np.arange(3), 8) #: for tokens in memory, numpy.save(path, ...)
Tensors() #: Tensors(x, y)
Tensors([1, 2]) #: torch.tensor makes one
Tensors(torch.arange(3), torch.arange(4)) #: [3, 4]
Tensors(torch.zeros(3, requires_grad=True)) #: .detach()
Tensors(torch.tensor(3)) #: no dimensions
Tensors(np.array(["a"])) #: torch cannot convert
FromDataset(numbers, threads=0) #: FromDataset(threads=...)
FromDataset(3) #: __getitem__ and __len__
FromDataset(numbers, setup=3) #: must be callable
FromDataset(numbers, fingerprint=3) #: non-empty str
Mixture([folder]) #: dict of sources by name
Mixture({"a": folder}, {"b": 1.0}) #: ['a']
Mixture({"a": folder}, {"a": 0}) #: above 0
Mixture({"a": folder, "b": numbers}) #: pass Mixture(decode={'a':
Stream(3) #: iter
Stream(numbers, shuffle_buffer=-1) #: shuffle_buffer
Feeder(Stream(numbers), batch_size=2, shuffle=True) #: shuffle_buffer=N
Feeder(Stream(numbers), batch_size=2, cache="host") #: leave it out
Clips("videos/", 4) #: VideoFolder: the folder 'videos/' does not exist
Clips("train/a/0.png", 4) #: aiofeed.Files(paths)
Clips(["a.mp4"], 4) #: aiofeed.Files(paths)
Clips(folder, 0) #: Clips(frames=...)
Clips(folder, 4, fps=0) #: frames per second above 0
Clips(folder, 4, stride=2, fps=8) #: leave one out
Clips(folder, 4, frame_rate=30) #: it is called fps
Clips(folder, 4, audio=DecodeAudio(16000)) #: needs fps=
Clips(folder, 4, fps=8, audio=16000) #: aiofeed.DecodeAudio(rate=...)
AudioFolder("train") #: has no recordings
pad_collate(dim=2) #: the last one
== Decoders
DecodeImage() #: size
DecodeImage(size=None) #: mode="keep"
DecodeImage(0) #: size must be at least 1
DecodeImage("224") #: size must be an int
DecodeImage(224.0) #: size must be an int, (height, width) or None
DecodeImage(224, 224) #: for height and width: DecodeImage((224, 224))
Files(["a"], [0], "root") #: further arguments by name: root=
DecodeImage((224,)) #: (height, width)
DecodeImage(224, mode="RGB") #: "rgb" or "keep"
DecodeImage(224, crop="middle") #: "center" or "random"
DecodeImage(224, mean=[0.5]) #: transform= of Feeder
DecodeImage(224, resize=100) #: at least size=224
DecodeImage(224, scale=(1, 0)) #: scale
DecodeImage(224, flip=0.5) #: flip
DecodeImage(224, formats=["HEIC"]) #: formats
DecodeImage(224, backend="opencv") #: backend
DecodeImage(224)("0.png") #: bytes of one image
image("train/a/0.png") #: pathlib.Path(path).read_bytes()
DecodeNumpy()("0.npy") #: pathlib.Path(path).read_bytes()
DecodePair(image, ("jpg", "png")) #: further arguments by name: fields=
DecodePair(3) #: DecodeImage
DecodeAudio(0, 1.0) #: rate
DecodeNumpy(member=3) #: member
== Caches and batches
DiskCache(3) #: path of a file
DiskCache("~/cache") #: os.path.expanduser('~/cache')
DiskCache("x", max_bytes=0) #: max_bytes
EncodedCache("x", 0) #: max_bytes
EncodedCache("x") #: max_bytes
HostCache(max_bytes=0) #: max_bytes
Feeder(folder, decode=image, batch_size=2, cache="gpu") #: aiofeed.HostCache
Feeder(folder, decode=image, batch_size=2, cache=True) #: aiofeed.HostCache
Feeder(folder, decode=DecodeImage(16, crop="random"), batch_size=2, cache="device") #: cache="host"
Feeder(folder, decode=image, batch_size=2, cache="host", engine="process") #: cache=DiskCache(path)
Buckets([1, 2], [1], [4]) #: batch_sizes
Buckets([1, 2], (8,), (0, 1)) #: batch_sizes
TokenBudget([1, 2], 0) #: max_tokens
Pack([1, 2], 0) #: context
TokenBudget(1024) #: come first: TokenBudget(lengths, max_tokens=1024)
Balanced(1024, 8) #: come first: Balanced(lengths, max_tokens=1024)
Buckets(np.int64(8)) #: come first: Buckets(lengths, boundaries=8)
Pack(2048) #: come first: Pack(lengths, context=2048)
Pack([1, 2, 3]) #: Pack needs context=
TokenBudget([1, 2, 3]) #: TokenBudget needs max_tokens=
Balanced([1, 2], 0) #: max_tokens
Feeder(numbers, batch_size=TokenBudget([1, 2], 8)) #: 2
== Several processes
aiofeed.serve(3, "feed") #: Feeder
aiofeed.attach(3) #: address
aiofeed.processes.attach_tensors("nobody", timeout_s=0.05) #: aiofeed.processes.share(
aiofeed.processes.share("x", "name") #: tensor
aiofeed.scatter(3, []) #: device
aiofeed.Explanations #: no attribute 'Explanations'
"""


class NoKey:
    """A source without names."""

    def __len__(self) -> int:
        return 2

    async def read(self, index: int) -> bytes:
        return b""


async def coroutine(data: Any) -> Any:
    return data


def broken(data: Any) -> Any:
    raise ValueError("broken on purpose")


def two(data: Any, label: Any) -> Any:
    return data


def generator(data: Any) -> Any:
    yield data


async def asynchronous_generator(data: Any) -> Any:
    yield data


class Generates:
    """A decoder that is a generator function."""

    def __call__(self, data: Any) -> Any:
        yield data


class WrongTarget:
    """A decoder that asks for targets, and does not take them."""

    takes_target = True

    def __call__(self, data: Any) -> Any:
        return data


def per_sample(image: Any) -> Any:
    return image.resize((2, 2))


def prepare() -> dict[str, Any]:
    """Write the files that the mistakes use into the current folder; return what they name."""
    for place in ("train/a", "train/b", "images", "masks"):
        Path(place).mkdir(parents=True)
        for number in range(4):
            Image.new("L" if place == "masks" else "RGB", (32, 32)).save(f"{place}/{number}.png")
    Path("shards").mkdir()
    Path("text.png").write_text("this is a text and not a picture, nor a shard " * 40)
    Path("empty.png").touch()
    Path("list.csv").write_text("path,label\ntrain/a/0.png,3\n")
    Path("list.txt").write_text("train/a/0.png\n")
    np.arange(100, dtype=np.uint16).tofile("tokens.bin")
    with tarfile.open("shards/x.tar", "w") as tar:
        tar.add("train/a/0.png", "0.jpg")
        tar.add("list.txt", "0.cls")
    names = {name: getattr(aiofeed, name) for name in aiofeed.__all__}
    folder, image = aiofeed.ImageFolder("train"), aiofeed.DecodeImage(16)
    fed = aiofeed.Feeder(folder, decode=image, batch_size=4)
    frame = __import__("pandas").DataFrame({"x": [1, 2]})
    names |= {"generates": Generates(), "pair": aiofeed.DecodePair(image)}
    names |= {"image_bytes": Path("images/0.png").read_bytes()}
    names |= {"folder": folder, "image": image, "fed": fed, "frame": frame, "numbers": list(range(8))}
    return names | {"aiofeed": aiofeed, "torch": torch, "np": np, "Path": Path, "SimulatedDevice": SimulatedDevice}


def message_of(code: str, names: dict[str, Any]) -> str | None:
    """The type, message and notes of the error of a mistake; ``None`` without an error."""
    try:
        exec(code, {**globals(), **names})
    except Exception as error:  # any: it is printed
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return None


def mistakes() -> Iterator[tuple[str, str, str]]:
    """The section, the code and the words of its message for each mistake."""
    section = ""
    for line in filter(None, MISTAKES.splitlines()):
        if line.startswith("== "):
            section = line[3:]
        else:
            code, words = line.split(" #: ")
            yield section, code, words


def main() -> int:
    """Print the page; the exit code is the number of mistakes whose message lacks its words."""
    warnings.simplefilter("ignore")
    seen, lacking = "", 0
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        names = prepare()
        for section, code, words in mistakes():
            if section != seen:
                print(f"\n# {section}")
                seen = section
            message = message_of(code, names)
            lacks = message is None or words not in message
            lacking += lacks
            print(f"\n>>> {code}\n{'!!! without ' + words + ': ' if lacks else ''}{message}", flush=True)
        names["fed"].close()
        os.chdir("/")
    return lacking


if __name__ == "__main__":
    sys.exit(main())
