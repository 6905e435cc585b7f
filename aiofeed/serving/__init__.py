"""One feed for several processes: serve and attach."""
