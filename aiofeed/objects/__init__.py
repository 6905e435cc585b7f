"""Objects in cloud storage and on web servers, through obstore."""

# Its frames between the engine and the user's code are left out of tracebacks.
hides_frames: bool = True
