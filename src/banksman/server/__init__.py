"""HTTP server in front of a host: authentication, start policy, API routes and event streams.

This package holds no session logic. A route turns a request into one call of the host, and the
result of that call into JSON.
"""
