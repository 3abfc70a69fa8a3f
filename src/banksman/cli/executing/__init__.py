"""A command in the foreground of a terminal."""
