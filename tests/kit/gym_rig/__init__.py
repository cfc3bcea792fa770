"""What the tests of the servers and of the operator stand on: a clock that jumps, and a whole cell inside one event
loop.

`gym_rig.virtual` is an event loop whose time moves only when everything waits, so a test of a lease or a retry takes
no real time. `gym_rig.cell` assembles real servers and connects them without sockets. What the tests of one subject
share, such as agents alone, has a module of its own here: those tests may then be as many modules as they need.
"""
