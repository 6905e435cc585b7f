"""Decoders of video and audio over PyAV, whose wheels have the libraries of FFmpeg."""
