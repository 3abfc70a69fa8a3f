"""Verbs of the command line, one module each.

`parser()` returns the argument parser of the verb. `main(words)` runs it and returns the exit code.
"""
