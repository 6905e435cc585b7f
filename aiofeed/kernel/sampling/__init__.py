"""The order of samples: permutations, shards, resume. No I/O."""
