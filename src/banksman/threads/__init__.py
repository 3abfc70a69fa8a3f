"""Blocking API of Banksman, for programs with threads and without an event loop.

    with threads.Host() as host:
        session = host.open("claude")
        print(session.ask_and_wait("Why is CI red?", timeout=600).text)

The names are those of `banksman`. Each object wraps an async object of an event loop that runs in a
separate thread (see `loop_thread.py`). A call blocks until the async call has ended. Values and
errors are those of `banksman`. In addition:

- Any thread may call at any time.
- Ctrl-C in the main thread and the end of a `timeout` cancel the async call: `ask` withdraws the
  ask, and most other calls only stop waiting.
- Callbacks (`on_question`, `on_output`) run in the thread of the loop. A blocking call there would
  wait for itself, so it raises `UsageError`. Calls that never wait are allowed there.
- After `Host.close`, calls raise `Closed`. Known results can still be read: an outcome, a status,
  the end of a command. A call that did not raise has taken effect.
- A forked child cannot use a host that its parent made before the fork.
"""

from __future__ import annotations

from banksman.threads.blocking import OutputReader, Reader
from banksman.threads.blocking_command import Command
from banksman.threads.blocking_execute import execute, start
from banksman.threads.blocking_host import Host
from banksman.threads.blocking_session import Session, Turn

__all__ = ["Command", "Host", "OutputReader", "Reader", "Session", "Turn", "execute", "start"]
