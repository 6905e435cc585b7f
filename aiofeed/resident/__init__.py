"""Batches of data that are in memory, of the host or the device."""
