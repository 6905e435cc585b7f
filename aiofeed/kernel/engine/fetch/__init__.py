"""Reads and decodes chunks of a batch."""
