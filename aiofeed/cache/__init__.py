"""Decoded samples that are kept: in memory for one feeder, or in a file that processes share."""
