"""Writes the files beside it with MosaicML Streaming 0.13: ``python tests/data/mds/make.py``."""

from decimal import Decimal
from pathlib import Path

import numpy as np
from PIL import Image
from streaming.base.format.mds.writer import MDSWriter

columns = {"p": "pil", "lp": "list[pil]", "lj": "list[jpeg]", "ja": "jpeg_array", "sd": "str_decimal"}
with MDSWriter(out=str(Path(__file__).parent / "bz2"), columns=columns, compression="bz2") as out:
    for number in range(5):
        image = Image.fromarray(np.arange(6 * (number + 1), dtype=np.uint8).reshape(2, -1, 3))
        lists = {"lp": [image.getchannel(0)] * number, "lj": [image] * number, "ja": [b"\xff\xd8\xff", b"2"]}
        out.write({"p": image, "sd": Decimal(number).scaleb(-2), **lists})
