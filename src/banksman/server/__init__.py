"""HTTP server in front of a host: authentication, API routes, event streams, page, operations.

This package holds no session logic. A route turns a request into one call of the host, and the
result of that call into JSON.
"""
