"""The host and its statistics, and the functions `execute`, `start` and `shutdown`."""
