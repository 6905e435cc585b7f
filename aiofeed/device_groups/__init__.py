"""Several devices (``device=[...]``, ``scatter``), and batches at fixed addresses (``static_batches=True``)."""
