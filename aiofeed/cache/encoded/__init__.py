"""The source that looks encoded samples up in a cache."""
