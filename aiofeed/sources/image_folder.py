"""Folders of images: ``ImageFolder`` has one sub-folder per class, ``FolderPairs`` a folder of masks beside it."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiofeed.core.types import public
from aiofeed.core.validation import check_bool, counted, explain_arguments
from aiofeed.sources.file_io import MAX_BYTES, ReadRules
from aiofeed.sources.files import Files
from aiofeed.sources.objects.urls import check_path, join_url, redacted, scheme_of, split_url

# The list of torchvision, so that samples have the same indices.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
MASK_EXTENSIONS = (*EXTENSIONS, ".gif")
# The number of files that an error message lists.
_LISTED = 5


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

    if TYPE_CHECKING:

        async def read(self, index: int, /) -> bytes:
            """Read a whole file."""

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
        if not isinstance(root, str | os.PathLike):
            raise TypeError(f"ImageFolder needs the path or URL of a folder, got {root!r}; Files takes a list of paths")
        root = os.fspath(root)
        is_url = store is not None or scheme_of(root) not in (None, "file")
        paths: Sequence[str]
        if is_url:
            from aiofeed.sources.objects.samples import list_classes

            check_bool("refresh", refresh)
            paths, counts, loose = list_classes(root, EXTENSIONS, store=store, options=options, refresh=refresh)
            shown = redacted(root)
        elif options is not None or refresh:
            raise ValueError(f"options= and refresh= are for URLs, and {root!r} is a folder: leave them out")
        else:
            shown = check_path(split_url(root)[1])
            paths, counts, loose = _list_folder(shown, follow_symlinks)
        if not counts:
            raise FileNotFoundError(_no_classes(shown, loose))
        for name, count in counts.items():
            if not count:
                raise FileNotFoundError(
                    f"ImageFolder: class {name!r} of {shown!r} has no images ({', '.join(EXTENSIONS)}): remove the "
                    f"folder, or list files of your own in Files(paths, targets)"
                )
        self.classes: list[str] = list(counts)
        self.class_to_idx: dict[str, int] = {name: number for number, name in enumerate(self.classes)}
        targets = array("i")
        for number, count in enumerate(counts.values()):
            targets.extend(array("i", [number]) * count)
        super().__init__(
            paths,
            targets if is_url else targets.tolist(),
            follow_symlinks=is_url or follow_symlinks,
            max_bytes=max_bytes,
        )
        self.root = shown
        if not is_url:  # the paths are below the root already, and links were checked while listing
            self._rules = ReadRules(max_bytes, follow_symlinks, shown)

    def __repr__(self) -> str:
        return f"ImageFolder({self.root!r}: {counted(len(self), 'file')}, {counted(len(self.classes), 'class')})"


@public
@explain_arguments({"targets": "pass boxes=, or Files([(image, mask), ...], targets)"})
class FolderPairs(Files):
    """One sample per image in a folder and its mask in another; boxes may be its target. For ``DecodePair``.

    An image and its mask have the same path below their folders, apart from the extension: ``images/street/01.jpg`` and
    ``masks/street/01.png``. Samples are sorted by that path. Images have the extensions of ``ImageFolder``; masks may
    also be .gif. For masks with other names pass ``Files([(image, mask), ...])``.

    Args:
        images: The folder of images, or its URL.
        masks: The folder of masks, or its URL.
        boxes: For each image its boxes, float [N, 4] as left, upper, right, lower in pixels of the upright picture, or
            a dict with these as ``"boxes"`` (see ``DecodePair``). A dict by the path below ``images``, with the
            extension and with ``/``.
        follow_symlinks: Whether to include linked files and folders.
        max_bytes: The maximum size of a file.
        options: For URLs: arguments of ``obstore.store.from_url``.
        refresh: Whether to list a URL again, in place of using the cached listing.

    Attributes:
        names: The path of each sample below its folder, without the extension.

    Raises:
        FileNotFoundError: A folder does not exist, or has no images.
        OSError: A folder or a URL cannot be listed.
        ValueError: An image has no mask, a mask has no image, an image is not in ``boxes``, or two files differ in
            their extension only. The message lists them.
    """

    def __init__(
        self,
        images: str | os.PathLike[str],
        masks: str | os.PathLike[str],
        boxes: Mapping[str, Any] | None = None,
        *,
        follow_symlinks: bool = True,
        max_bytes: int = MAX_BYTES,
        options: Mapping[str, Any] | None = None,
        refresh: bool = False,
    ) -> None:
        if boxes is not None and not isinstance(boxes, Mapping):
            raise TypeError(f"FolderPairs(boxes=) must be a dict of boxes by the path of the image, got {boxes!r}")
        check_bool("follow_symlinks", follow_symlinks)
        root = os.fspath(images)
        sizes: dict[str, int] = {}
        found, beside = (
            _by_name(os.fspath(folder), endings, follow_symlinks, options, refresh, sizes)
            for folder, endings in ((images, EXTENSIONS), (masks, MASK_EXTENSIONS))
        )
        for names, problem in (
            (found.keys() - beside.keys(), "images without a mask"),
            (beside.keys() - found.keys(), "masks without an image"),
        ):
            if names:
                raise ValueError(
                    f"FolderPairs: {redacted(root)!r} and {redacted(os.fspath(masks))!r} have "
                    f"{_listed(problem, names)}; a pair has the same name in both folders. For other names pass "
                    f"Files([(image, mask), ...])"
                )
        self.names: list[str] = sorted(found)
        targets: list[Any] | None = None
        if boxes is not None:
            paths = {name: name + os.path.splitext(found[name])[1] for name in self.names}
            if missing := [path for path in paths.values() if path not in boxes]:
                raise ValueError(f"FolderPairs(boxes=) has no boxes of {_listed('images', missing)}; pass [] for none")
            each = [boxes[paths[name]] for name in self.names]
            targets = [target if isinstance(target, Mapping) else {"boxes": target} for target in each]
        super().__init__(
            [(found[name], beside[name]) for name in self.names],
            targets,
            follow_symlinks=follow_symlinks,
            max_bytes=max_bytes,
            options=options,
        )
        if self._objects is not None:
            self._objects.sizes = [sizes[path] for name in self.names for path in (found[name], beside[name])]


def _by_name(
    root: str,
    endings: Sequence[str],
    follow_symlinks: bool,
    options: Mapping[str, Any] | None,
    refresh: bool,
    sizes: dict[str, int],
) -> dict[str, str]:
    """The path of each image of a folder by its path below the folder, with ``/`` and without the extension.

    Adds the sizes of images at a URL to ``sizes``, by their URLs.
    """
    if scheme_of(root) not in (None, "file"):
        from aiofeed.sources.objects.listing import list_objects
        from aiofeed.sources.objects.reader import ObjectReader

        listing = list_objects(ObjectReader(root, options=options), refresh=refresh)
        found = {key: join_url(root.rstrip("/"), key) for key in listing.keys if key.lower().endswith(tuple(endings))}
        sizes.update(
            (found[key], size) for key, size in zip(listing.keys, listing.sizes.tolist(), strict=True) if key in found
        )
    else:
        root = check_path(split_url(root)[1])
        if not os.path.isdir(root):
            raise FileNotFoundError(f"FolderPairs: the folder {root!r} does not exist{_missing_part(root)}")
        paths = _images(root, follow_symlinks, tuple(endings))
        found = {os.path.relpath(path, root).replace(os.sep, "/"): path for path in paths}
    if not found:
        raise FileNotFoundError(f"FolderPairs: {redacted(root)!r} has no images ({', '.join(endings)})")
    by_name: dict[str, str] = {}
    for path in found:
        name = os.path.splitext(path)[0]
        if name in by_name:
            raise ValueError(
                f"FolderPairs: {redacted(found[path])!r} and {redacted(by_name[name])!r} differ in their extension "
                f"only, so that their pairs are ambiguous: pass Files([(image, mask), ...])"
            )
        by_name[name] = found[path]
    return by_name


def _listed(what: str, names: Iterable[str]) -> str:
    """The number of files and the first names."""
    first = sorted(names)
    more = ", ..." if len(first) > _LISTED else ""
    return f"{len(first)} {what}: {', '.join(map(repr, first[:_LISTED]))}{more}"


def _list_folder(root: str, follow_symlinks: bool) -> tuple[list[str], dict[str, int], int]:
    """The images in the folders below a root, the number of those of each class, and of those in no folder."""
    if not os.path.isdir(root):
        if os.path.exists(root):
            raise NotADirectoryError(f"ImageFolder: {root!r} is not a folder")
        raise FileNotFoundError(f"ImageFolder: the folder {root!r} does not exist{_missing_part(root)}")
    with os.scandir(root) as entries:
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=follow_symlinks)]
    classes = sorted(name for name in folders if not name.startswith("."))
    images = {name: _images(os.path.join(root, name), follow_symlinks) for name in classes}
    loose = 0 if classes else sum(path.suffix.lower() in EXTENSIONS for path in Path(root).iterdir())
    return list(chain.from_iterable(images.values())), {name: len(found) for name, found in images.items()}, loose


def _images(folder: str, follow_symlinks: bool, endings: tuple[str, ...] = EXTENSIONS) -> list[str]:
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
        images = [os.path.join(parent, name) for name in sorted(names) if name.lower().endswith(endings)]
        found.append((parent, [path for path in images if follow_symlinks or not os.path.islink(path)]))
    return [path for _, images in sorted(found) for path in images]


def _refuse(error: OSError) -> None:
    # By default, os.walk silently skips a folder that cannot be listed.
    raise error


def _missing_part(root: str) -> str:
    """The existing parent folder and the missing part; shows the base of a relative path, too."""
    try:
        absolute = os.path.abspath(root)
    except FileNotFoundError:
        return ", and neither does the working folder, which was deleted"
    parent = os.path.dirname(absolute)
    while not os.path.isdir(parent) and parent != os.path.dirname(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or os.path.exists(absolute):
        return ""
    missing = os.path.relpath(absolute, parent).split(os.sep)[0]
    return f"; {parent!r} exists and has no {missing!r}"


def _no_classes(root: str, loose: int) -> str:
    if loose:
        return (
            f"ImageFolder: {root!r} has {counted(loose, 'image')} but no sub-folders, which are the classes; "
            f"for images without labels pass their paths to aiofeed.Files"
        )
    return f"ImageFolder: {root!r} has no sub-folders with images ({', '.join(EXTENSIONS)})"
