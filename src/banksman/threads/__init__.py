"""Banksman for programs that have threads and no loop: the same names, blocking, to be called from any thread.

    with threads.Host() as host:
        session = host.open("claude")
        print(session.ask_and_wait("Why is CI red?", timeout=600).text)

Each object here has an async one behind it, in a loop that runs in a thread (see `loop_thread.py`). A call waits until
the async call has ended. Values and errors are those of `banksman`. In addition:

Any thread may call, at any time. Ctrl-C in the main thread, and the end of a `timeout`, do what cancellation does to
the async call: `ask` withdraws, most others only stop waiting. Callbacks (`on_question`, `on_output`) run in the loop's
thread, where a call that waits would wait for itself, and raises `UsageError`; what never waits may be called there.

After `Host.close` calls raise `Closed`, but what was learned can still be read: an outcome, a status, the end of a
command. Whatever did not raise was done. A fork of the program cannot use a host that was made before it.
"""

from __future__ import annotations

from banksman.threads.blocking import OutputReader, Reader
from banksman.threads.blocking_command import Command
from banksman.threads.blocking_execute import execute, start
from banksman.threads.blocking_host import Host
from banksman.threads.blocking_session import Session, Turn

__all__ = ["Command", "Host", "OutputReader", "Reader", "Session", "Turn", "execute", "start"]
