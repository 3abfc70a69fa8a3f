"""HTTP side of a cluster: forwarded requests, lists from many hosts, placement of new sessions."""
