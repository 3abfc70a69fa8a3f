"""Files and terminals that an agent asks its client for: inside the session's folder, and gone with the process.

An agent that speaks ACP may leave its reading, its writing and its commands to us. `Workspace` (request_handler.py)
answers these requests for one process of an agent; what it is made of is told in each file.
"""

from banksman.sessions.workspace.request_handler import GROUPS, Workspace
from banksman.sessions.workspace.terminals import start_command

__all__ = ["GROUPS", "Workspace", "start_command"]
