"""Commands: plain programs that run to their end or in the background."""
