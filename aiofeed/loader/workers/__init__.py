"""The worker processes of ``aiofeed.DataLoader``, which work as torch's do: one batch at a time, in one thread each."""
