"""Message types of the HTTP API: one for each request body, query and response.

Requests are decoded strictly: an unknown member is an error. The OpenAPI description is generated
from the same types, so that it matches what the server accepts. Each module of routes has a module
of messages, except `host_routes`, which uses `admin_messages`.

The docstring of a type is its description. The section `Attributes:` at its end describes the
fields; inherited fields are described where they are defined.
"""
