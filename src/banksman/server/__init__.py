"""The server: HTTP in front of a host. Who may come in, what they may start, and everybody's own stream of the log.

There is no logic of sessions here. A route turns a request into one call of the host, and what comes back into JSON.
"""
