"""Decoded samples that are kept, in memory, on disk or on a device."""
