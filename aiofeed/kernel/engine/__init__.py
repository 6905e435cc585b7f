"""Turns batch plans into finished batches."""
