"""Events as they go out: read once, written to whoever follows, at the pace of each."""
