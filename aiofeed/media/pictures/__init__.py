"""Pictures that the kernel does not decode: with all their channels, and by other libraries."""
