"""Batches of data that are already in memory."""
