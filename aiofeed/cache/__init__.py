"""Caches of decoded samples: in memory, in a file, or on a device."""
