"""What the tests of the servers stand on: a clock that jumps, and a whole cell inside one event loop.

`gym_rig.virtual` is an event loop whose time moves only when everything waits, so a test of a lease or a retry takes
no real time. `gym_rig.cell` assembles real servers and connects them without sockets.
"""
