"""Samples that are parts of large arrays on disk."""
