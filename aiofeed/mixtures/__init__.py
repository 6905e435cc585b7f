"""Several sources as one, from which samples are drawn by weight."""
