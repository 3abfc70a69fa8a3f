"""Whether all is well on this machine: a file for each group of checks. A check looks, and changes nothing.

Each check is a function that returns what it found. None of them raises: one that cannot be made says so, and keeps
none of the others from being made.
"""
