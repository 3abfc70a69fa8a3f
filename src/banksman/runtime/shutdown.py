"""`shutdown`: end all processes that this process has started, and wait for that.

The spawner does the work: `process/zygote_client.py`. Programs may call `shutdown` in a signal
handler, and a handler can be entered again while it runs. So `shutdown` imports nothing when it is
called, and exists as soon as `banksman` is imported. If the process has started anything, the
spawner is already loaded.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from banksman.process.zygote_client import Spawner

_HOLDER = "banksman.process.zygote_client"


def shutdown() -> bool:
    """End every command of this process, and the zygote; True if all are gone.

    The commands of every loop and every thread are ended.

    Blocks for at most the longest `grace` of a running command plus 7 seconds. It runs at
    interpreter exit. Call it before `os._exit`, or where a leftover helper process would be in the
    way. Commands that a caller still waits for end as HOST_CLOSED. A later command starts a new
    zygote.
    """
    # The module is missing, or a signal arrived while it is being loaded. In both cases nothing has
    # been started.
    spawner: Spawner | None = getattr(sys.modules.get(_HOLDER), "spawner", None)
    return spawner is None or spawner.shutdown()
