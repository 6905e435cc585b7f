"""Sockets, shared memory and codecs that processes share."""
