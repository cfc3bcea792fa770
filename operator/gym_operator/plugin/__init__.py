"""`kubectl gym`: what people ask of stacks and checkpoints, from their own machine and with their own rights.

`arguments` reads the command line. `verbs` has a module for each verb, which asks the cluster and the storage and
says what came of it; `views` decides, in pure code, what is shown and what is made. Nothing here talks to a server of
a stack: what is wanted is written as an object, and the operator does it.
"""
