"""Batches of data that are in memory, of the host or the device."""

# Its frames between the engine and the user's code are left out of tracebacks.
hides_frames: bool = True
