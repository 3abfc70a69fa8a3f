"""ACP client methods for files and terminals, limited to the session's folder.

An ACP agent may delegate file reads, file writes and commands to its client. `Workspace`
(request_handler.py) answers these requests for one agent process. Terminals end with that process.
"""

from banksman.sessions.workspace.request_handler import GROUPS, Workspace
from banksman.sessions.workspace.terminals import start_command

__all__ = ["GROUPS", "Workspace", "start_command"]
