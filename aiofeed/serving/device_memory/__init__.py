"""Batches in device memory that several processes map."""
