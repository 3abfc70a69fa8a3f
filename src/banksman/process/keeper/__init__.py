"""Helper processes: the zygote, which forks keepers, and the keeper, the parent of one command.

They are the other end of `process/process.py`. These files run in separate processes, which a bare
interpreter starts from `__main__.py`. They end process trees in place of the host. `messages.py`
defines the messages that both ends exchange. In the host, `process/orphans.py` uses `sweep.py` and
`proc_tree.py` too, for the trees of dead hosts. `banksman.guard` is a zygote for one command, and
forks its keeper itself.

**After a bug.** An exception ends a keeper with another status than `DUTY_DONE`. The zygote then
takes over its tree and kills it, without a grace. If the zygote is dead too, nothing ends the tree.
An exception in the zygote ends the zygote. Its keepers end their trees without it, but the orphans
of a lost keeper stay. So an `assert` stands only where its failure leaves no tree without a guard:
- in a keeper, before the command starts, or after ECHILD has proven that the tree is gone;
- in the forked child of a command, which reports each failure through its pipe;
- in the zygote, while it has no orphans to end.
"""
