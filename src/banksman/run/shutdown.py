"""`shutdown`: end everything this process has started, and wait for it."""

from __future__ import annotations

from banksman.run.child.spawner import spawner


def shutdown() -> bool:
    """End every command of this process, in every loop and thread, and the zygote; True if all are gone.

    Blocks for at most the longest `grace` of a running command and 7 seconds. It is called at interpreter exit; call it
    before `os._exit`, or where a leftover helper process is in the way. Commands that somebody still waits for end as
    HOST_CLOSED. A later command starts a new zygote.
    """
    return spawner.shutdown()
