"""Sessions with agents: their state, the calls on them, and the start of the agent's process."""
