"""Iterables as sources: their items have no index."""
