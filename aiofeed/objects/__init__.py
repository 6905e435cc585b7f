"""Objects in cloud storage and on web servers, through obstore."""
