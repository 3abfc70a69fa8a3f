"""Drop-in for the subprocess functions of asyncio, on Banksman's process layer.

    from banksman import asyncio as basyncio

    process = await basyncio.create_subprocess_exec("agent", stdout=basyncio.PIPE)

The functions have the signatures of asyncio's, and `Process` is a subclass of
`asyncio.subprocess.Process`. The difference is the guarantee. The keeper is the parent process of
the child. When the child exits, when the loop ends, and when this program is killed, no process of
the child's tree is left. `docs/how-to/drop-ins.md` lists all differences.

- `process.py`: the public functions and `Process`.
- `transport.py`: the transport between a command and the stream classes of asyncio.
- `popen_keywords.py`: the keywords of `subprocess.Popen`, and errors as asyncio raises them.
"""

from __future__ import annotations

from asyncio.subprocess import DEVNULL, PIPE, STDOUT

from banksman.asyncio.process import Process, create_subprocess_exec, create_subprocess_shell

__all__ = [
    "DEVNULL",
    "PIPE",
    "STDOUT",
    "Process",
    "create_subprocess_exec",
    "create_subprocess_shell",
]
