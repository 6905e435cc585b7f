"""A folder of images, one sub-folder per class, as torchvision's ``ImageFolder`` has it."""

from __future__ import annotations

import os
from pathlib import Path

from aiofeed.core.types import public
from aiofeed.sources.file_io import MAX_BYTES, ReadRules
from aiofeed.sources.files import Files

# torchvision's list, so that both give a sample the same index.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


@public
class ImageFolder(Files):
    """``root/class_name/.../image.jpg``: one sample per image, its class's number as target.

    Classes are the sorted names of the sub-folders, files are sorted within each, sub-folders included: the order
    of ``torchvision.datasets.ImageFolder``. As there, an image is a file whose name ends in .jpg, .jpeg, .png, .ppm,
    .bmp, .pgm, .tif, .tiff or .webp, in any case; others (.gif, .jp2, .avif, ...) are passed over. ``Files`` takes any.

    Args:
        root: the folder.
        follow_symlinks: whether linked files and folders count, wherever they lead. A folder that links to one of its
            parents is entered once. If not, a link that takes a file's or a folder's place later is not followed
            either: reading the file is then an error.
        max_bytes: of one file; a larger one is an error before any of it is read.

    Attributes:
        classes: the class names, sorted.
        class_to_idx: the number of each class.
        targets: the class number of each sample.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it, or a class without images.
        NotADirectoryError: ``root`` is a file.
        OSError: a folder below it cannot be listed.
    """

    root: str
    targets: list[int]

    def __init__(
        self, root: str | os.PathLike[str], *, follow_symlinks: bool = True, max_bytes: int = MAX_BYTES
    ) -> None:
        root = os.fspath(root)
        if not os.path.isdir(root):
            if os.path.exists(root):
                raise NotADirectoryError(f"ImageFolder: {root!r} is not a folder")
            raise FileNotFoundError(f"ImageFolder: there is no folder {root!r}{_as_far(root)}")
        with os.scandir(root) as entries:
            self.classes = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=follow_symlinks))
        if not self.classes:
            raise FileNotFoundError(_no_classes(root))
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        paths: list[str] = []
        targets: list[int] = []
        for name, number in self.class_to_idx.items():
            found = _images(os.path.join(root, name), follow_symlinks)
            if not found:
                raise FileNotFoundError(
                    f"ImageFolder: class {name!r} of {root!r} has no image ({', '.join(EXTENSIONS)})"
                )
            paths += found
            targets += [number] * len(found)
        super().__init__(paths, targets, follow_symlinks=follow_symlinks, max_bytes=max_bytes)
        # The paths were found below the root: there is nothing to join, nor to look at twice.
        self.root = root
        self._rules = ReadRules(max_bytes, follow_symlinks, root)

    def __repr__(self) -> str:
        return f"ImageFolder({self.root!r}: {len(self)} files, {len(self.classes)} classes)"


def _images(folder: str, follow_symlinks: bool) -> list[str]:
    found: list[tuple[str, list[str]]] = []
    # For each folder on the way down, the real paths above it: a link back to one of them would never end.
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
    # os.walk would pass over a folder that cannot be listed, and its images would be missing without a word.
    raise error


def _as_far(root: str) -> str:
    """How much of a path is there; so it shows from where a relative one is looked for, too."""
    absolute = os.path.abspath(root)
    parent = os.path.dirname(absolute)
    while not os.path.isdir(parent) and parent != os.path.dirname(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or os.path.exists(absolute):
        return ""
    missing = os.path.relpath(absolute, parent).split(os.sep)[0]
    return f"; {parent!r} is there, and has no {missing!r}"


def _no_classes(root: str) -> str:
    loose = sum(1 for path in Path(root).iterdir() if path.suffix.lower() in EXTENSIONS)
    if loose:
        return (
            f"ImageFolder: {root!r} has {loose} images but no sub-folders, one per class; "
            f"for images without labels pass their paths to aiofeed.Files"
        )
    return f"ImageFolder: {root!r} has no sub-folders with images ({', '.join(EXTENSIONS)})"
