"""``aiofeed.DataLoader``, ``prefetch`` and ``aiofeed run``: loaders for programs that have no ``Feeder``."""
