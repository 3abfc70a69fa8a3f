"""The HTTP side of a cluster: forwarded requests, lists from many hosts, and where a new session goes."""
