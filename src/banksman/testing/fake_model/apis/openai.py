"""What OpenAI's two APIs share: the shape of their errors. Pure."""

from __future__ import annotations

from typing import Any

KINDS = {
    400: "invalid_request_error",
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    429: "rate_limit_exceeded",
    500: "server_error",
    503: "server_is_overloaded",
}
KIND = "server_error"
OVERFLOW = (
    "context_length_exceeded",
    "Your input exceeds the context window of this model. Please adjust your input and try again.",
)


def error(status: int, kind: str, message: str) -> dict[str, Any]:
    whose = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": whose, "param": None, "code": kind}}
