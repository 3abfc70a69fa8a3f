"""Dialects: pure translation between an agent's lines and the meanings of the state machine."""
