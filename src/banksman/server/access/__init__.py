"""Who may do what at the server: named tokens, their roles, and the sessions that they may use."""
