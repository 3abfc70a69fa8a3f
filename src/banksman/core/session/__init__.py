"""The session state machine: `step(state, fact) -> (state, effects)`, and one module for each part of it."""
