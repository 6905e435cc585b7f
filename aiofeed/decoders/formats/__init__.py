"""Decoders of files beyond RGB by Pillow: pictures as they are, and plain PNGs by libpng."""
