"""Verbs of the command line (`banksman VERB …`), one module each.

`parser()` returns the argument parser of the verb. `main(words)` runs it and returns the exit code.
In all other text a command is a program that Banksman runs, not a verb.
"""
