"""ACP client methods for files and terminals of a session's folder.

An ACP agent may delegate file reads, file writes and commands to its client. `Workspace`
(request_handler.py) answers these requests for one agent process. Files must be inside the folder
(safe_paths.py). A terminal starts inside it, but its command is not confined. Terminals end with
the agent's process.
"""

from banksman.sessions.workspace.request_handler import GROUPS, Workspace
from banksman.sessions.workspace.terminals import start_command

__all__ = ["GROUPS", "Workspace", "start_command"]
