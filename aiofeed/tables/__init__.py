"""Tables: columns of numbers gathered as tensors, rows of other columns."""
