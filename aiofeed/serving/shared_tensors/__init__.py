"""Tensors in memory that several processes share."""
