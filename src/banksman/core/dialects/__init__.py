"""How each family of agents speaks: line ↔ meaning, as pure functions."""
