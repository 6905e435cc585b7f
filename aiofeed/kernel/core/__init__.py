"""Plain values: types, errors, limits, policies and statistics. Imports no other room of aiofeed."""
