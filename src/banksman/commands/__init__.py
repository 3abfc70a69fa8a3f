"""Plain programs: run to their end, or in the background."""
