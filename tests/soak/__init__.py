"""A soak test: thousands of epochs at random, started and ended in every way. No batch is lost, doubled or leaked.

`python -m tests.soak --minutes 3 --seed 1` runs it, `--episode K` replays one episode of a seed.
"""
