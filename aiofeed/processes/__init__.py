"""More than one process: workers, serving and shared tensors."""
