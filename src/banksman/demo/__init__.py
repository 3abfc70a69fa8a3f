"""`make run` and `make tour`: what Banksman is for, to look at. No key, and no network."""
