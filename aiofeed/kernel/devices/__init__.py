"""Accelerators: backends, streams, pinned memory and copies."""
