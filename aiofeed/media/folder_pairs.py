"""Folders of images and masks: ``FolderPairs``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiofeed import _load_addon
from aiofeed.kernel.core.formatting import shown
from aiofeed.kernel.core.types import public
from aiofeed.kernel.core.validation import check_bool, explain_arguments
from aiofeed.kernel.sources.file_io import MAX_BYTES, check_path, local_path
from aiofeed.kernel.sources.files import Files
from aiofeed.kernel.sources.image_folder import EXTENSIONS, images_below, missing_part

MASK_EXTENSIONS = (*EXTENSIONS, ".gif")
# The number of files that an error message lists.
_LISTED = 5


@public
@explain_arguments({"targets": "pass boxes=, or Files([(image, mask), ...], targets)"})
class FolderPairs(Files):
    """One sample per image in a folder and its mask in another; boxes may be its target. For ``DecodePair``.

    Example:
        ```python
        import aiofeed

        pairs = aiofeed.FolderPairs("photos", "masks")
        decode = aiofeed.DecodePair(aiofeed.DecodeImage(size=224, flip=True))
        for images, masks in aiofeed.Feeder(pairs, decode=decode, batch_size=4):
            print(images.shape, masks.shape)
        ```

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
        found, sizes = _by_name(root, EXTENSIONS, follow_symlinks, options, refresh)
        beside, more = _by_name(os.fspath(masks), MASK_EXTENSIONS, follow_symlinks, options, refresh)
        for names, problem in (
            (found.keys() - beside.keys(), "images without a mask"),
            (beside.keys() - found.keys(), "masks without an image"),
        ):
            if names:
                raise ValueError(
                    f"FolderPairs: {shown(root)!r} and {shown(os.fspath(masks))!r} have "
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
        pairs = [(found[name], beside[name]) for name in self.names]
        super().__init__(pairs, targets, follow_symlinks=follow_symlinks, max_bytes=max_bytes, options=options)
        if self._objects is not None:
            sizes |= more
            self._objects.sizes = [sizes[path] for name in self.names for path in (found[name], beside[name])]


def _by_name(
    root: str, endings: Sequence[str], follow_symlinks: bool, options: Mapping[str, Any] | None, refresh: bool
) -> tuple[dict[str, str], dict[str, int]]:
    """Return the path of each image of a folder by its path below the folder, with ``/`` and without the extension.

    Also return the sizes of images at a URL, by their URLs.
    """
    sizes: dict[str, int] = {}
    if (folder := local_path(root)) is None:
        images: dict[str, tuple[str, int]] = _load_addon("images_at", "a URL")(root, endings, options, refresh)
        found = {key: url for key, (url, _) in images.items()}
        sizes = dict(images.values())
    else:
        root = check_path(folder)
        if not os.path.isdir(root):
            raise FileNotFoundError(f"FolderPairs: the folder {root!r} does not exist{missing_part(root)}")
        paths = images_below(root, follow_symlinks, tuple(endings))
        found = {os.path.relpath(path, root).replace(os.sep, "/"): path for path in paths}
    if not found:
        raise FileNotFoundError(f"FolderPairs: {shown(root)!r} has no images ({', '.join(endings)})")
    by_name: dict[str, str] = {}
    for path in found:
        name = os.path.splitext(path)[0]
        if name in by_name:
            raise ValueError(
                f"FolderPairs: {found[path]!r} and {by_name[name]!r} differ in their extension "
                f"only, so that their pairs are ambiguous: pass Files([(image, mask), ...])"
            )
        by_name[name] = found[path]
    return by_name, sizes


def _listed(what: str, names: Iterable[str]) -> str:
    """Return the number of files and the first names."""
    first = sorted(names)
    more = ", ..." if len(first) > _LISTED else ""
    return f"{len(first)} {what}: {', '.join(map(repr, first[:_LISTED]))}{more}"
