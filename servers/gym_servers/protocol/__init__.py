"""The checkpoint protocol as pure values and rules: no I/O, no clock, no event loop."""
