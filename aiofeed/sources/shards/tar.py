"""``TarShards``: samples of several files in tar files, grouped as WebDataset does."""

from __future__ import annotations

from collections.abc import Sequence

from aiofeed.core.types import public
from aiofeed.core.validation import explain_arguments
from aiofeed.sources.shards.base import FieldShards, some_samples
from aiofeed.sources.shards.index import ShardIndex
from aiofeed.sources.shards.indexing import IndexRules, idx_key
from aiofeed.sources.shards.tar_index import (
    BLOCK,
    foreign_index,
    may_be_named,
    member_size,
    members_of,
    scan_tar,
)
from aiofeed.sources.shards.urls import Shard

# More than the zeros at the end of a tar file: it fills a record, of 10 KiB by default.
_END_BYTES = 1 << 20

TAR_RULES = IndexRules(
    "tar",
    scan_tar,
    {idx_key: foreign_index, lambda key: f"{key}.idx": foreign_index},  # energon's is x.tar.idx
)


@public
@explain_arguments()
class TarShards(FieldShards):
    """Samples in tar files, grouped as WebDataset does. Any sample is read without those before it.

    Consecutive members whose names agree up to the first dot of the last part are a sample: ``0001.jpg`` and
    ``0001.cls`` have the key ``0001`` and the fields ``jpg`` and ``cls``. Without ``data``, a sample is a dict of all
    its fields as bytes. Of tar files joined by ``cat`` all samples are read.

    The index of each shard is taken from the cache folder, from ``x.tar.aiofeed``, or from an index of DALI
    (``x.idx``) or energon (``x.tar.idx``) beside the shard, if it fits. Otherwise it is made in one pass, which reads
    the headers of a file or streams an object, and cached. ``aiofeed index`` makes indexes in advance.

    Args:
        urls: URLs or paths: a list, or one with braces such as ``s3://bucket/train-{000..099}.tar`` or a glob; or a
            JSON list of shards made by ``widsindex``.
        data: The field whose bytes ``decode=`` gets, or alternatives: ``"jpg;png"``. A list of names: a dict of these.
            Default: a dict of all.
        target: The field of the target; a sample is then ``(decoded, target)``. The bytes of all targets are read once,
            when the source is made, and stay in memory.
        to_target: Makes a target of the bytes of its field. Default: ``int``.
        store: An obstore store that reads the URLs. Default: made of the URLs.
        options: Arguments of ``obstore.store.from_url``, such as ``{"endpoint": ..., "region": ...}``.

    Raises:
        FileNotFoundError: A shard does not exist.
        ValueError: A shard is compressed, truncated, damaged or no tar file; no sample has a field; or a URL cannot be
            read.
        OSError: A shard cannot be read.
    """

    rules = TAR_RULES
    default_to_target = int

    async def _check_fit(self, shard: Shard, index: ShardIndex) -> None:
        await super()._check_fit(shard, index)
        # A tar file may grow without another size, because it ends with zeros. Other tar files may be joined to it.
        after = -(-int(index.ends.max(initial=0)) // BLOCK) * BLOCK
        stop = min(after + _END_BYTES, shard.size)
        if after < stop and any((await shard.read([(after, stop)]))[0]):
            raise ValueError(f"other members follow at byte {after}, behind those that it has")
        if index.keys is None or index.fields is None or not len(index):
            return
        samples = some_samples(index)
        members = [index.members(sample)[0] for sample in samples]
        headers = await shard.read(
            [(int(index.starts[member]), int(index.starts[member]) + BLOCK) for member in members]
        )
        for sample, member, header in zip(samples, members, headers, strict=True):
            name = index.keys[sample] + b"." + index.names[int(index.fields[member])].encode("utf-8", "surrogateescape")
            if not may_be_named(header, name):
                raise ValueError(f"there is no {name.decode(errors='replace')!r} where it says")

    def _unpack(self, index: ShardIndex, sample: int, parts: Sequence[bytes]) -> dict[str, bytes]:
        if index.fields is None:
            found = members_of(parts[0])
            return {field: data for field, data in found.items() if not index.names or field in index.names}
        fields = {}
        for member, part in zip(index.members(sample), parts, strict=True):
            if member_size(part) != len(part) - BLOCK:
                raise ValueError("the header of a member is not where the index says; the shard has another index")
            fields[index.names[int(index.fields[member])]] = part[BLOCK:]
        return fields
