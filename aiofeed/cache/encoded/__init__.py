"""The cache of encoded samples: its file, and the source that uses it."""
