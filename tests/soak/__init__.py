"""Thousands of epochs, opened and left in every way at random: nothing lost, nothing doubled, nothing left behind.

`python -m tests.soak --minutes 3 --seed 1` runs it, `--episode K` replays one episode of a seed.
"""
