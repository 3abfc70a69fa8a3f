"""Session state machine: `step(state, fact) -> (state, effects)`, with one module per part."""
