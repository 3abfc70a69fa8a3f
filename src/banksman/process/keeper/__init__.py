"""The other end of `process/process.py`: a zygote that forks keepers, and the keeper that is a command's parent.

These files run in processes of their own, started from `__main__.py` with a bare interpreter, and are the only ones
that know about trees and signals. `messages.py` is what both ends share.
"""
