import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiofeed.kernel.sources.image_folder import EXTENSIONS
from aiofeed.objects.keys import KeyPacker

NAMES = st.text(st.sampled_from("aZ./é0\x7f"), max_size=6)
KEYS = st.lists(st.tuples(NAMES, st.sampled_from(["", *EXTENSIONS, ".JPG", ".Webp", ".txt", "jpg"])).map("/".join))


def packed(keys):
    packer = KeyPacker()
    packer.add(keys)
    return packer.packed()


@given(KEYS, st.data())
def test_keys_are_a_sequence(keys, data):
    """Packed keys are the sequence that was packed, in any selection, also after pickling."""
    found = packed(keys)
    assert list(found) == keys == found[:]
    assert len(pickle.loads(pickle.dumps(found))) == len(keys)
    selected = data.draw(st.lists(st.integers(0, len(keys) - 1))) if keys else []
    assert list(found.take(np.array(selected, np.int64))) == [keys[at] for at in selected]


@given(KEYS)
def test_what_is_computed_for_all_keys(keys):
    """Endings and slashes are those of the texts."""
    found = packed(keys)
    assert found.ends_with(EXTENSIONS).tolist() == [key.lower().endswith(EXTENSIONS) for key in keys]
    assert found.slashes().tolist() == [key.count("/") for key in keys]


def test_positions_outside():
    """Positions outside of the sequence are an ``IndexError``; negative ones count from the end."""
    found = packed(["a", "b"])
    assert found[-1] == "b"
    for index in (2, -3):
        with pytest.raises(IndexError):
            found[index]
