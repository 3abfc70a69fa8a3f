"""Message types of the HTTP API: one for each request body, query and response.

Requests are decoded strictly: an unknown member is an error. The OpenAPI description is generated
from the same types, so that it matches what the server accepts. Each module of the API has a module
of messages.

The docstring of a type is its description. The section `Attributes:` at its end describes the
fields; inherited fields are described where they are defined.
"""
