"""HTTP API: the routes, their messages, idempotency, and the OpenAPI description."""
