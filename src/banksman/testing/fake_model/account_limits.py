"""How each model API reports the usage windows of an account: response headers and error fields.

Pure functions. Only the APIs of Claude Code and Codex have such windows. Another API answers a used
up account like a short throttle, with `Retry-After`.
"""

from __future__ import annotations

from typing import Any

# Length of the window that the fake reports: five hours, the shorter window of both providers.
WINDOW_MINUTES = 300


def headers(api: str, *, used_percent: float, resets_at: int) -> dict[str, str]:
    """Return the headers of an answer to an account with this use of its window."""
    assert used_percent >= 0
    if api == "anthropic":
        status = "rejected" if used_percent >= 100 else "allowed"
        prefix = "anthropic-ratelimit-unified"
        return {
            f"{prefix}-status": status,
            f"{prefix}-reset": str(resets_at),
            f"{prefix}-representative-claim": "five_hour",
            f"{prefix}-5h-status": status,
            f"{prefix}-5h-reset": str(resets_at),
            f"{prefix}-5h-utilization": f"{used_percent / 100:g}",
        }
    if api == "responses":
        return {
            "x-codex-primary-used-percent": f"{used_percent:g}",
            "x-codex-primary-window-minutes": str(WINDOW_MINUTES),
            "x-codex-primary-reset-at": str(resets_at),
        }
    return {}


def error_fields(api: str, *, resets_at: int) -> dict[str, Any]:
    """Return the fields of the error for an account whose window is used up."""
    if api != "responses":
        return {}
    return {"type": "usage_limit_reached", "plan_type": "pro", "resets_at": resets_at}
