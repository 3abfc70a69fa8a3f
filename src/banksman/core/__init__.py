"""Pure core of Banksman: state machines and wire formats that take values and return values.

No module here uses a clock, an event loop, a file, a thread, a logger or a random source.
"""
