"""Threads, the event loop, queues, memory buffers and time limits."""
