"""Ray actors for engine="ray"."""
