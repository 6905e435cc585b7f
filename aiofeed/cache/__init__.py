"""Caches of samples, decoded or encoded: in memory or in a file."""

# Its frames between the engine and the user's code are left out of tracebacks.
hides_frames: bool = True
