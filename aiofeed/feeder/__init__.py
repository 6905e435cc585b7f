"""What users hold: Feeder, iterators, prefetch, scatter, serve and attach."""
