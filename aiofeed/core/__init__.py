"""Plain values: types, errors, limits, policies and statistics. Imports nothing else of aiofeed."""
