"""Who comes in: the socket, the connection, the door, the secret, and what may be started."""
