"""`banksman guard`: run a command with the streams of its caller, and end its whole process tree.

Two processes do this. The guard, which the caller started, waits. It forks a keeper
(`process/keeper`), the parent process of the command, and plays the part of the zygote for it. The
keeper has every deadline and takes the rungs of the stop ladder, so a guard that is stopped
(Ctrl-Z) or killed leaves no tree. If the keeper is killed, the guard ends the tree.

- `settings.py`: what to run, and how.
- `run.py`: the whole run, from the signals to the outcome.
- `start.py`: fork the keeper.
- `event_loop.py`: signals, stdin, messages of the keeper, a lost keeper.
- `signals.py`: take signals over from the caller, and die of one.
- `outcome.py`: how it ended, as an exit code and as the JSON of `--report`.

`process/caller.py` and `process/tree_limits.py` are shared with `banksman exec`.

This package imports no asyncio and nothing that costs milliseconds: a guard starts with every tool
that an agent uses. Decision 15 has the reasons.
"""
