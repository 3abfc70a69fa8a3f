"""Sessions with agents: callers' objects, ownership and I/O around `core/session/`."""
