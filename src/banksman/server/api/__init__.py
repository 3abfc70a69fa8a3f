"""The calls: what each takes and answers, and the one call of the host that it is."""
