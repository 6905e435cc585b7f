"""Explains where the time of an epoch went: counters to a verdict, a table and advice. Pure functions."""
