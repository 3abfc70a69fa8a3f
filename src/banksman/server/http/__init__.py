"""HTTP entrance: accept loop, connections, authentication, the token file, and the start policy."""
