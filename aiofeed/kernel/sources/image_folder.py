"""Folders of images, with one sub-folder per class: ``ImageFolder``."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from aiofeed import _load_addon
from aiofeed.kernel.core.formatting import shown
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_bool, counted, explain_arguments
from aiofeed.kernel.sources.file_io import MAX_BYTES, ReadRules, check_path, local_path
from aiofeed.kernel.sources.files import Files

# The list of torchvision, so that samples have the same indices.
EXTENSIONS: tuple[str, ...] = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

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

    Example:
        ```python
        import aiofeed

        photos = aiofeed.ImageFolder("photos")
        print(photos.classes, len(photos))
        train = photos.split({"train": 0.8, "validation": 0.2})["train"]
        feeder = aiofeed.Feeder(train, decode=aiofeed.DecodeImage(size=224), batch_size=32, shuffle=True)
        ```

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
    # What a subclass lists: the ends of the names of files, and what messages call them.
    _endings: ClassVar[tuple[str, ...]] = EXTENSIONS
    _what: ClassVar[str] = "image"

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
        name, endings = type(self).__name__, self._endings
        if not isinstance(root, str | os.PathLike):
            raise TypeError(f"{name} needs the path or URL of a folder, got {root!r}; Files takes a list of paths")
        root = os.fspath(root)
        folder = local_path(root)
        is_url = store is not None or folder is None
        paths: Sequence[str]
        if store is not None or folder is None:
            check_bool("refresh", refresh)
            list_classes = _load_addon("list_classes", "a URL")
            paths, counts, loose = list_classes(root, endings, store=store, options=options, refresh=refresh)
            named = shown(root)
        elif options is not None or refresh:
            raise ValueError(f"options= and refresh= are for URLs, and {root!r} is a folder: leave them out")
        else:
            named = check_path(folder)
            paths, counts, loose = self._listed(named, follow_symlinks)
        if not counts:
            raise FileNotFoundError(self._without_classes(named, loose))
        for each, count in counts.items():
            if not count:
                raise FileNotFoundError(
                    f"{name}: class {each!r} of {named!r} has no {self._what}s ({', '.join(endings)}): remove the "
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
        self.root = named
        if not is_url:  # the paths are below the root already, and links were checked while listing
            self._rules = ReadRules(max_bytes, follow_symlinks, named)

    def __repr__(self) -> str:
        counts = f"{counted(len(self), 'file')}, {counted(len(self.classes), 'class')}"
        return f"{type(self).__name__}({self.root!r}: {counts})"

    def _listed(self, root: str, follow_symlinks: bool) -> tuple[list[str], dict[str, int], int]:
        """Return the files in the folders below a root, the number of each class, and that of those in no folder."""
        name = type(self).__name__
        if not os.path.isdir(root):
            if os.path.exists(root):
                raise NotADirectoryError(f"{name}: {root!r} is not a folder")
            raise FileNotFoundError(f"{name}: the folder {root!r} does not exist{missing_part(root)}")
        with os.scandir(root) as entries:
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=follow_symlinks)]
        classes = sorted(name for name in folders if not name.startswith("."))
        found = {name: images_below(os.path.join(root, name), follow_symlinks, self._endings) for name in classes}
        loose = 0 if classes else sum(path.suffix.lower() in self._endings for path in Path(root).iterdir())
        return list(chain.from_iterable(found.values())), {name: len(paths) for name, paths in found.items()}, loose

    def _without_classes(self, root: str, loose: int) -> str:
        name, what = type(self).__name__, self._what
        if loose:
            return (
                f"{name}: {root!r} has {counted(loose, what)} but no sub-folders, which are the classes; "
                f"for {what}s without labels pass their paths to aiofeed.Files"
            )
        return f"{name}: {root!r} has no sub-folders with {what}s ({', '.join(self._endings)})"


def images_below(folder: str, follow_symlinks: bool, endings: tuple[str, ...] = EXTENSIONS) -> list[str]:
    """Return the files in a folder and those below it whose names end so, by folder, then by name."""
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


def missing_part(root: str) -> str:
    """Return the existing parent folder and the missing part; shows the base of a relative path, too."""
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
