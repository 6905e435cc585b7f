"""The public names, for type checkers."""

from typing import Any

from aiofeed import errors as errors
from aiofeed import exporters as exporters
from aiofeed import processes as processes
from aiofeed import reports as reports
from aiofeed import testing as testing
from aiofeed.cache.disk import DiskCache as DiskCache
from aiofeed.cache.encoded.database import EncodedCache as EncodedCache
from aiofeed.cache.host import HostCache as HostCache
from aiofeed.core.errors import FeedError as FeedError
from aiofeed.core.failure_policy import FailurePolicy as FailurePolicy
from aiofeed.core.limits import Limits as Limits
from aiofeed.core.types import Decoder as Decoder
from aiofeed.core.types import Source as Source
from aiofeed.decoders.image import DecodeImage as DecodeImage
from aiofeed.decoders.media.audio import DecodeAudio as DecodeAudio
from aiofeed.decoders.media.clips import Clips as Clips
from aiofeed.decoders.pairs import DecodePair as DecodePair
from aiofeed.decoders.records import DecodeJSON as DecodeJSON
from aiofeed.decoders.records import DecodeNumpy as DecodeNumpy
from aiofeed.decoders.records import DecodeTensor as DecodeTensor
from aiofeed.devices.scatter import scatter as scatter
from aiofeed.engine.fetch.sequences import pad_collate as pad_collate
from aiofeed.feeder.arguments import Processes as Processes
from aiofeed.feeder.attach import attach as attach
from aiofeed.feeder.dataloader import DataLoader as DataLoader
from aiofeed.feeder.feeder import Feeder as Feeder
from aiofeed.feeder.prefetch import prefetch as prefetch
from aiofeed.feeder.serve import serve as serve
from aiofeed.reports.machine import device_report as device_report
from aiofeed.sampling.listers.balanced import Balanced as Balanced
from aiofeed.sampling.listers.length_plans import Buckets as Buckets
from aiofeed.sampling.listers.length_plans import TokenBudget as TokenBudget
from aiofeed.sampling.listers.packing import Pack as Pack
from aiofeed.sources.dataset import FromDataset as FromDataset
from aiofeed.sources.episodes.episodes import Episodes as Episodes
from aiofeed.sources.files import Files as Files
from aiofeed.sources.image_folder import ImageFolder as ImageFolder
from aiofeed.sources.mixture import Mixture as Mixture
from aiofeed.sources.objects.manifest import Manifest as Manifest
from aiofeed.sources.pairs.folder_pairs import FolderPairs as FolderPairs
from aiofeed.sources.shards.mds import MDSShards as MDSShards
from aiofeed.sources.shards.parquet import ParquetRows as ParquetRows
from aiofeed.sources.shards.tar import TarShards as TarShards
from aiofeed.sources.shards.tfrecord import TFRecordShards as TFRecordShards
from aiofeed.sources.shards.zip import ZipShards as ZipShards
from aiofeed.sources.stream import Stream as Stream
from aiofeed.sources.tables.table import Table as Table
from aiofeed.sources.tensors import Tensors as Tensors
from aiofeed.sources.tokens.windows import Tokens as Tokens

__version__: str

def _load_addon(name: str, needed_by: str) -> Any: ...
