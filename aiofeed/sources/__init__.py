"""Sources of samples: files, datasets and in-memory data."""
