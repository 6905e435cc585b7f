"""``aiofeed run`` and ``%load_ext aiofeed``: loaders of torch's ``DataLoader`` class use aiofeed's iterators."""
