"""Video and audio by PyAV, images with masks and boxes, arrays, augmentation."""
