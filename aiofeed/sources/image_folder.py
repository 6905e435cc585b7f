"""A folder of images with one sub-folder per class, like torchvision's ``ImageFolder``."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiofeed.core.types import public
from aiofeed.core.validation import check_bool, explain_arguments
from aiofeed.sources.file_io import MAX_BYTES, ReadRules
from aiofeed.sources.files import Files
from aiofeed.sources.objects.urls import redacted, scheme_of, split_url

# The list of torchvision, so that samples have the same indices.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


_WAYS = {
    "transform": "decode= of Feeder gets the bytes (DecodeImage(size)), its transform= gets the batches",
    "target_transform": "pass Files(folder.paths, targets) with targets of your own",
    "loader": "pass decode= to Feeder",
    "is_valid_file": "pass Files(paths, targets) with files of your own",
    "allow_empty": "remove empty folders",
}


@public
@explain_arguments(_WAYS)
class ImageFolder(Files):
    """One sample per image in ``root/class_name/.../image.jpg``; its target is the number of its class.

    Classes are the sorted names of the sub-folders; hidden ones, such as ``.ipynb_checkpoints``, are ignored. Within a
    class, files are sorted, including those of nested folders, in the order of ``torchvision.datasets.ImageFolder``. As
    there, images are files whose names end in .jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff or .webp, in any case;
    other files (.gif, .jp2, .avif, ...) are ignored. ``Files`` reads any.

    Args:
        root: The folder; or a URL of s3://, gs:// or az://, whose listing is cached on disk.
        follow_symlinks: Whether to include linked files and folders. A link to a parent folder is entered once. If
            False, links that replace files or folders later are refused when the file is read.
        max_bytes: The maximum size of a file; a larger one is an error before any of it is read.
        store: An obstore store that reads the URL. Default: made of it, with the usual environment variables and
            configuration files.
        options: Arguments of ``obstore.store.from_url``, such as ``{"endpoint": ..., "region": ...}``.
        refresh: Whether to list a URL again, in place of using the cached listing.

    Attributes:
        classes: The sorted class names.
        class_to_idx: The number of each class.
        targets: The class number of each sample.

    Raises:
        FileNotFoundError: The folder does not exist or has no class, or a class has no images.
        NotADirectoryError: ``root`` is a file.
        OSError: A folder or a URL cannot be listed.
    """

    root: str
    targets: Sequence[int]

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        follow_symlinks: bool = True,
        max_bytes: int = MAX_BYTES,
        store: Any = None,
        options: Mapping[str, Any] | None = None,
        refresh: bool = False,
    ) -> None:
        root = os.fspath(root)
        if store is not None or scheme_of(root) not in (None, "file"):
            self._list_url(root, store, options, check_bool("refresh", refresh))
            super().__init__(self.paths, self.targets, max_bytes=max_bytes)
            self.root = redacted(root)
            return
        if options is not None or refresh:
            raise ValueError(f"options= and refresh= are for URLs, and {root!r} is a folder: leave them out")
        root = split_url(root)[1]
        if not os.path.isdir(root):
            if os.path.exists(root):
                raise NotADirectoryError(f"ImageFolder: {root!r} is not a folder")
            raise FileNotFoundError(f"ImageFolder: the folder {root!r} does not exist{_missing_part(root)}")
        with os.scandir(root) as entries:
            self.classes = sorted(entry.name for entry in entries if _is_class(entry, follow_symlinks))
        if not self.classes:
            loose = sum(1 for path in Path(root).iterdir() if path.suffix.lower() in EXTENSIONS)
            raise FileNotFoundError(_no_classes(root, loose))
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        paths: list[str] = []
        targets: list[int] = []
        for name, number in self.class_to_idx.items():
            found = _images(os.path.join(root, name), follow_symlinks)
            if not found:
                raise FileNotFoundError(_no_images(root, name))
            paths += found
            targets += [number] * len(found)
        super().__init__(paths, targets, follow_symlinks=follow_symlinks, max_bytes=max_bytes)
        # The paths are below the root already, and links were checked while listing.
        self.root = root
        self._rules = ReadRules(max_bytes, follow_symlinks, root)

    def _list_url(self, root: str, store: Any, options: Mapping[str, Any] | None, refresh: bool) -> None:
        from aiofeed.sources.objects.samples import list_classes

        self.paths, counts, loose = list_classes(root, EXTENSIONS, store=store, options=options, refresh=refresh)
        root = redacted(root)
        if not counts:
            raise FileNotFoundError(_no_classes(root, loose))
        for name, count in counts.items():
            if not count:
                raise FileNotFoundError(_no_images(root, name))
        self.classes = list(counts)
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.targets = array("i")
        for number, count in enumerate(counts.values()):
            self.targets.extend(array("i", [number]) * count)

    def __repr__(self) -> str:
        return f"ImageFolder({self.root!r}: {len(self)} files, {len(self.classes)} classes)"


def _images(folder: str, follow_symlinks: bool) -> list[str]:
    found: list[tuple[str, list[str]]] = []
    # The real paths above each folder: following a link to one of them would not end.
    above: dict[str, frozenset[str]] = {folder: frozenset((os.path.realpath(folder),))}
    for parent, folders, names in os.walk(folder, followlinks=follow_symlinks, onerror=_refuse):
        parents = above.pop(parent)
        for name in list(folders):
            path = os.path.join(parent, name)
            if os.path.islink(path) and (not follow_symlinks or os.path.realpath(path) in parents):
                folders.remove(name)
            else:
                above[path] = parents | {os.path.realpath(path)}
        images = [os.path.join(parent, name) for name in sorted(names) if name.lower().endswith(EXTENSIONS)]
        found.append((parent, [path for path in images if follow_symlinks or not os.path.islink(path)]))
    return [path for _, images in sorted(found) for path in images]


def _refuse(error: OSError) -> None:
    # By default, os.walk silently skips a folder that cannot be listed.
    raise error


def _missing_part(root: str) -> str:
    """The existing parent folder and the missing part; shows the base of a relative path, too."""
    absolute = os.path.abspath(root)
    parent = os.path.dirname(absolute)
    while not os.path.isdir(parent) and parent != os.path.dirname(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or os.path.exists(absolute):
        return ""
    missing = os.path.relpath(absolute, parent).split(os.sep)[0]
    return f"; {parent!r} exists and has no {missing!r}"


def _no_images(root: str, name: str) -> str:
    return (
        f"ImageFolder: class {name!r} of {root!r} has no images ({', '.join(EXTENSIONS)}): remove the "
        f"folder, or list files of your own in Files(paths, targets)"
    )


def _no_classes(root: str, loose: int) -> str:
    if loose:
        return (
            f"ImageFolder: {root!r} has {loose} images but no sub-folders, which are the classes; "
            f"for images without labels pass their paths to aiofeed.Files"
        )
    return f"ImageFolder: {root!r} has no sub-folders with images ({', '.join(EXTENSIONS)})"


def _is_class(entry: os.DirEntry[str], follow_symlinks: bool) -> bool:
    return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=follow_symlinks)
