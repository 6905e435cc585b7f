"""A folder of images, one sub-folder per class, as torchvision's ``ImageFolder`` has it."""

from __future__ import annotations

import os
from pathlib import Path

from aiofeed.sources.files import Files

# torchvision's list, so that both give a sample the same index.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder(Files):
    """``root/class_name/.../image.jpg``: one sample per image, its class's number as target.

    Classes are the sorted names of the sub-folders, files are sorted within each, sub-folders included: the order
    of ``torchvision.datasets.ImageFolder``.

    Args:
        root: the folder.
        follow_symlinks: whether linked files and folders count. A folder that links to one of its parents is
            entered once.

    Attributes:
        classes: the class names, sorted.
        class_to_idx: the number of each class.
        targets: the class number of each sample.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it, or a class without images.
        NotADirectoryError: ``root`` is a file.
    """

    targets: list[int]

    def __init__(self, root: str | os.PathLike[str], *, follow_symlinks: bool = True) -> None:
        self.root = os.fspath(root)
        if not os.path.isdir(self.root):
            kind = NotADirectoryError if os.path.exists(self.root) else FileNotFoundError
            raise kind(f"ImageFolder: {self.root!r} is not a folder")
        self.classes = sorted(
            entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=follow_symlinks)
        )
        if not self.classes:
            raise FileNotFoundError(_no_classes(self.root))
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        paths: list[str] = []
        targets: list[int] = []
        for name, number in self.class_to_idx.items():
            found = _images(os.path.join(self.root, name), follow_symlinks)
            if not found:
                raise FileNotFoundError(
                    f"ImageFolder: class {name!r} of {self.root!r} has no image ({', '.join(EXTENSIONS)})"
                )
            paths += found
            targets += [number] * len(found)
        super().__init__(paths, targets)

    def __repr__(self) -> str:
        return f"ImageFolder({self.root!r}: {len(self)} files, {len(self.classes)} classes)"


def _images(folder: str, follow_symlinks: bool) -> list[str]:
    found: list[tuple[str, list[str]]] = []
    # For each folder on the way down, the real paths above it: a link back to one of them would never end.
    above: dict[str, frozenset[str]] = {folder: frozenset((os.path.realpath(folder),))}
    for parent, folders, names in os.walk(folder, followlinks=follow_symlinks):
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


def _no_classes(root: str) -> str:
    loose = sum(1 for path in Path(root).iterdir() if path.suffix.lower() in EXTENSIONS)
    if loose:
        return (
            f"ImageFolder: {root!r} has {loose} images but no sub-folders, one per class; "
            f"for images without labels pass their paths to aiofeed.Files"
        )
    return f"ImageFolder: {root!r} has no sub-folders with images ({', '.join(EXTENSIONS)})"
