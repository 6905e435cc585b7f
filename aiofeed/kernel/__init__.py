"""From files and datasets to batches on the device: all that a folder of JPEGs and a plain ``Dataset`` need."""
