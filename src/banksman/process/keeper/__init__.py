"""Helper processes: the zygote, which forks keepers, and the keeper, the parent of one command.

They are the other end of `process/process.py`. These files run in separate processes, which a bare
interpreter starts from `__main__.py`. Only they deal with process trees and signals. `messages.py`
defines the messages that both ends exchange.
"""
