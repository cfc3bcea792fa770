"""Random faults against a whole cell, and mutations of the product that they have to find.

`model` says what must hold, `watch` looks on while it happens, `world` is a cell that can be hurt, `machine` hurts
it at random. `mutants` names changes of the product that would break the protocol, and `mutate` sees to it that the
machine alone finds each of them.
"""
