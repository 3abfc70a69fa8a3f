"""Where the log of a session is kept: one protocol, several engines."""
