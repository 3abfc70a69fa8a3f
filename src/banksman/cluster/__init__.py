"""Many hosts on one store: the shared log on NATS, cluster membership and request forwarding."""
