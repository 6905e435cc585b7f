"""More than one process: workers, serving and shared tensors.

Example:
    ```python
    import torch

    import aiofeed

    shared = aiofeed.processes.share(torch.rand(1000, 8), "features")
    x = aiofeed.processes.attach_tensors("features")  # in another process
    ```
"""

from __future__ import annotations

from aiofeed import _namespace

__all__, __getattr__ = _namespace(__name__)
