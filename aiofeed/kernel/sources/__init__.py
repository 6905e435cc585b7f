"""Sources of samples: files, folders and datasets."""
