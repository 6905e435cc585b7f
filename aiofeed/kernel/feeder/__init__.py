"""What users hold: ``Feeder``, its arguments, and the iterator of an epoch."""
