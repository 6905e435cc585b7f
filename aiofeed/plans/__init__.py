"""Orders and batches other than the schedule's own: samplers, weights, plans by length, ranks of a mesh."""
