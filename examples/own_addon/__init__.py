"""An add-on of one's own: a source, a cache and a plan that plug into a `Feeder`, in a folder outside of aiofeed.

`python -m own_addon`, run in `examples/`, feeds the lines of a text file in batches of similar length.
"""

from own_addon.cache import CacheOfReads
from own_addon.plan import SimilarLengths
from own_addon.source import Lines

__all__ = ["CacheOfReads", "Lines", "SimilarLengths"]
