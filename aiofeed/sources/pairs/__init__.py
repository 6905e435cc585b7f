"""Pairs of an image and its mask."""
