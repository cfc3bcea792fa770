"""A tiny model for tests with a real engine: it solves counter rows, and thinks long enough to be interrupted.

`language` is what it reads and says, `train` makes it (`make tiny-model`), `model/` is what came out, with figures.
`engine` runs vLLM with it.
"""
