"""Pure core of Banksman: state machines and wire formats, without I/O.

No module here uses a clock, an event loop, a file, a thread, a logger or a random source. Nearly
all code takes values and returns values. The exceptions read a stream and are mutable objects: the
framer, the redactor of streamed texts, and the projectors and transcripts of the dialects.
"""
