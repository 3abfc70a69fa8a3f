"""Sessions: the door, what callers see of it, and what an agent needs to be started."""
