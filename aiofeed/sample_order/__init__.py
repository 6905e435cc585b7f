"""``in_order="samples"``: batches of whichever samples are ready."""
