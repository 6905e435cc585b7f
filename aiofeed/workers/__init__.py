"""Worker processes for engine="process"."""
