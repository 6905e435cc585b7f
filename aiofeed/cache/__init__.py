"""Caches of samples, decoded or encoded: in memory or in a file."""
