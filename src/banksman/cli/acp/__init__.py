"""`banksman acp`: ACP agent for editors, backed by one Banksman session per editor session.

An editor starts this program and speaks version 1 of the Agent Client Protocol with it, one
JSON-RPC message per line. Its requests go to a server over the HTTP API. The events of the
session's log come back as ACP updates. There is one code path for every server: a running `banksman
serve`, the server of another editor, or one inside this process. The last is started only if no
other is found.

    editor program ──► editor ──► methods ──► editor_session ──► backend ──► server, by its API
                   ◄── editor ◄── session_updates, open_questions ◄── the session's log, followed

This process keeps no state that the log lacks. An editor that dies and comes back gets everything
from the log.
"""
