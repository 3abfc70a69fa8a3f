"""`make run`: a guided look at what Banksman is for, in a terminal. No key, and no network."""
