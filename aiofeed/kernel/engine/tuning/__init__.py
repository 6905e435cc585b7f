"""Chooses thread and read counts. Pure arithmetic."""
