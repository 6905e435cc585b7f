"""The public names, for type checkers."""

from typing import Any

from aiofeed import errors as errors
from aiofeed import exporters as exporters
from aiofeed import processes as processes
from aiofeed import reports as reports
from aiofeed import testing as testing
from aiofeed.arrays.arrays import Arrays as Arrays
from aiofeed.cache.disk import DiskCache as DiskCache
from aiofeed.cache.disk import EncodedCache as EncodedCache
from aiofeed.cache.host import HostCache as HostCache
from aiofeed.device_groups.scatter import scatter as scatter
from aiofeed.episodes.episodes import Episodes as Episodes
from aiofeed.kernel.core.errors import FeedError as FeedError
from aiofeed.kernel.core.failures import FailurePolicy as FailurePolicy
from aiofeed.kernel.core.limits import Limits as Limits
from aiofeed.kernel.core.types import Decoder as Decoder
from aiofeed.kernel.core.types import Source as Source
from aiofeed.kernel.decoders.image import DecodeImage as DecodeImage
from aiofeed.kernel.feeder.arguments import Processes as Processes
from aiofeed.kernel.feeder.feeder import Feeder as Feeder
from aiofeed.kernel.sources.dataset import FromDataset as FromDataset
from aiofeed.kernel.sources.files import Files as Files
from aiofeed.kernel.sources.image_folder import ImageFolder as ImageFolder
from aiofeed.loader.dataloader import DataLoader as DataLoader
from aiofeed.loader.prefetch import prefetch as prefetch
from aiofeed.media.audio import DecodeAudio as DecodeAudio
from aiofeed.media.clips import Clips as Clips
from aiofeed.media.folder_pairs import FolderPairs as FolderPairs
from aiofeed.media.folders import AudioFolder as AudioFolder
from aiofeed.media.folders import VideoFolder as VideoFolder
from aiofeed.media.pairs import DecodePair as DecodePair
from aiofeed.media.records import DecodeJSON as DecodeJSON
from aiofeed.media.records import DecodeNumpy as DecodeNumpy
from aiofeed.media.records import DecodeTensor as DecodeTensor
from aiofeed.mixtures.mixture import Mixture as Mixture
from aiofeed.plans.balanced import Balanced as Balanced
from aiofeed.plans.length_plans import Buckets as Buckets
from aiofeed.plans.length_plans import TokenBudget as TokenBudget
from aiofeed.plans.packing import Pack as Pack
from aiofeed.plans.sequences import pad_collate as pad_collate
from aiofeed.reports.machine import device_report as device_report
from aiofeed.resident.tensors import Tensors as Tensors
from aiofeed.serving.attach import attach as attach
from aiofeed.serving.serve import serve as serve
from aiofeed.shards.foreign.array_record import ArrayRecordShards as ArrayRecordShards
from aiofeed.shards.foreign.litdata import LitDataShards as LitDataShards
from aiofeed.shards.mds import MDSShards as MDSShards
from aiofeed.shards.parquet import ParquetRows as ParquetRows
from aiofeed.shards.tar import TarShards as TarShards
from aiofeed.shards.tfrecord import TFRecordShards as TFRecordShards
from aiofeed.shards.zip import ZipShards as ZipShards
from aiofeed.streams.stream import Stream as Stream
from aiofeed.tables.manifest import Manifest as Manifest
from aiofeed.tables.table import Table as Table
from aiofeed.tokens.documents import Documents as Documents
from aiofeed.tokens.windows import Tokens as Tokens

__version__: str

def _load_addon(name: str, needed_by: str) -> Any: ...
def _hint_at(owner: str, name: Any) -> Any: ...
