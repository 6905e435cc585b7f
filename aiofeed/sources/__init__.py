"""Sources: where the samples come from."""
