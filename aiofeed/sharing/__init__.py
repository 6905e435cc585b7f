"""Engines in processes of their own, and the ring of shared memory in which their batches stand."""
