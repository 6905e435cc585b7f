"""Orders other than the schedule's own: samplers, plans of batches, mixtures, weights. Each lists epochs."""
