"""`banksman acp`: an ACP agent for editors, with a session of Banksman's behind each of theirs.

An editor starts this program and speaks the Agent Client Protocol with it, version 1, one JSON-RPC message a line. What
it asks for goes to a server over its HTTP API, and what is in the session's log comes back as the protocol's updates.
So there is one way, whoever has the server: a `banksman serve` that runs anyway, another editor's, or one inside of
this process, which is begun only if there is no other.

    the editor ──► wire ──► editor ──► talks ──► talk ──► backend ──► a server, by its API
               ◄── wire ◄── updates, questions ◄── the session's log, followed from a place on

Nothing is kept here that the log does not have. An editor that dies and comes back is told everything from there.
"""
