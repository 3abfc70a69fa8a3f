"""Many hosts: the shared log on NATS, a host as one member, and requests to the owner of a session."""
