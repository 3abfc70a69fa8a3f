"""`shutdown`: end everything this process has started, and wait for it.

It may be called in a signal handler, and handlers are entered again while they run: so it imports nothing when it is
called, and is there itself from the moment `banksman` is. Whoever has started something has loaded the spawner.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from banksman.process.zygote_client import Spawner

_HOLDER = "banksman.process.zygote_client"


def shutdown() -> bool:
    """End every command of this process, in every loop and thread, and the zygote; True if all are gone.

    Blocks for at most the longest `grace` of a running command and 7 seconds. It is called at interpreter exit; call it
    before `os._exit`, or where a leftover helper process is in the way. Commands that somebody still waits for end as
    HOST_CLOSED. A later command starts a new zygote.
    """
    # Not there, or a handler that came while it is being loaded: nothing has been started.
    spawner: Spawner | None = getattr(sys.modules.get(_HOLDER), "spawner", None)
    return spawner is None or spawner.shutdown()
