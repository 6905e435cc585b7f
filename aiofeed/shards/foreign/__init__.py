"""Formats that the packages of others read."""
