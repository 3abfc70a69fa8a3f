"""Classify a provider's failure by HTTP status or by its text: the tables that all dialects share.

A dialect decides by the fields of its frames first; see `provider_errors.py` of each dialect. The
text decides where an agent reports a failure only as text. Otherwise it only refines the kind that
a field names: see `refined`. All functions are pure. A text without a known phrase is no proof, so
the kind is then OTHER.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from banksman.core.dialects.meaning import ProviderFailure
from banksman.core.wire.elided_text import cut
from banksman.core.wire.partial_json import NUMBER_MAX, number
from banksman.errors import ErrorKind

# An error message is short. Only this much of a longer text is searched.
TEXT_CHARACTERS_MAX = 4000
# Limits of the fields that an event keeps of a failure, for a person to read.
RAW_CHARACTERS_MAX = 1000
RAW_FIELDS_MAX = 16
# A longer wait is no wait that a provider asks for.
WAIT_SECONDS_MAX = 366 * 86_400.0

_BY_STATUS = {
    401: ErrorKind.AUTH,
    402: ErrorKind.BILLING,
    403: ErrorKind.AUTH,
    408: ErrorKind.NETWORK,
    429: ErrorKind.RATE_LIMITED,
}
# Phrases of providers and agents, in lower case. The first match decides, so the specific kinds
# come first: the text about a usage limit may also mention a rate limit.
_BY_TEXT: tuple[tuple[ErrorKind, tuple[str, ...]], ...] = (
    (
        ErrorKind.CONTEXT_OVERFLOW,
        (
            *("prompt is too long", "context_length_exceeded", "maximum context length"),
            *("exceeds the context window", "input is too long", "exceed context limit"),
        ),
    ),
    (
        ErrorKind.BILLING,
        (
            *(
                "credit balance is too low",
                "insufficient_quota",
                "billing_error",
                "payment required",
            ),
            *("insufficient credits", "insufficient balance"),
        ),
    ),
    (
        ErrorKind.USAGE_LIMIT,
        (
            *("usage limit", "usage_limit_reached", "hit your 5-hour limit", "hit your limit"),
            *(
                "hit your weekly limit",
                "quota exceeded for quota metric",
                "exhausted your daily quota",
            ),
        ),
    ),
    (
        ErrorKind.AUTH,
        (
            *(
                "invalid api key",
                "invalid_api_key",
                "authentication_error",
                "authentication required",
            ),
            *("failed to authenticate", "unauthorized", "please run /login", "not logged in"),
        ),
    ),
    (
        ErrorKind.RATE_LIMITED,
        ("rate limit", "rate_limit", "too many requests", "resource_exhausted"),
    ),
    (
        ErrorKind.OVERLOADED,
        (
            "overloaded",
            "internal server error",
            "service unavailable",
            "at capacity",
            "high demand",
        ),
    ),
    (
        ErrorKind.NETWORK,
        (
            *("connection error", "connection to the api was lost", "stream disconnected"),
            *("econnreset", "econnrefused", "enotfound", "etimedout", "fetch failed"),
            *("network error", "connection refused", "connection reset", "error sending request"),
            "timed out",
        ),
    ),
)
# The kinds that a text may prove although a field names a more general one. APIs report a long
# prompt and an empty credit as a bad request, and a used up account as a throttle.
_REFINED = {
    ErrorKind.INVALID_REQUEST: (ErrorKind.CONTEXT_OVERFLOW, ErrorKind.BILLING),
    ErrorKind.RATE_LIMITED: (ErrorKind.USAGE_LIMIT, ErrorKind.BILLING),
}
# "API Error: 429 …", "status 429", "(429)", "last status: 429", "429 Too Many Requests". A bare
# number proves nothing: "401 bottles".
_STATUS = re.compile(
    r"(?:\b(?:status|error|code|http)\b[^\w]{0,3}|\()([45]\d\d)\b"
    r"|^([45]\d\d)(?=[:,]|\s*+(?:$|\{|status code)|\s(?-i:[A-Z]))",
    re.IGNORECASE,
)
# "try again in 1.5s", "retry after 20 seconds", "try again in 5 minutes", "try again in 6m0s".
_WAIT = re.compile(
    r"\b(?:try again|retry)[ -](?:in|after)[: ]{0,2}(\d++(?:\.\d++)?+)(?![.,]\d) ?([a-z]*)",
    re.IGNORECASE,
)
_UNIT_SECONDS = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("", "s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
}


def kind_of_status(status: int | None) -> ErrorKind | None:
    """Return the kind of an HTTP status of a model API; None if it is no error status."""
    if status is None or not 400 <= status <= 599:
        return None
    default = ErrorKind.INVALID_REQUEST if status < 500 else ErrorKind.OVERLOADED
    return _BY_STATUS.get(status, default)


def kind_of_text(text: str, among: Collection[ErrorKind] = tuple(ErrorKind)) -> ErrorKind | None:
    """Return the first kind that a phrase of the text proves; None without such a phrase."""
    said = text[:TEXT_CHARACTERS_MAX].lower()
    for kind, phrases in _BY_TEXT:
        if kind in among:
            for phrase in phrases:
                if phrase in said:
                    return kind
    return None


def refined(named: ErrorKind, text: str) -> ErrorKind:
    """Return the kind that a field names, or a more specific one that the text proves.

    A text may contain anything, so it never contradicts a field.
    """
    return kind_of_text(text, _REFINED.get(named, ())) or named


def status_in(text: str) -> int | None:
    """Return the HTTP status that an error text mentions."""
    found = _STATUS.search(text[:TEXT_CHARACTERS_MAX])
    return None if found is None else int(found[1] or found[2])


def wait_in(text: str) -> float | None:
    """Return the wait in seconds that an error text asks for; None if it is not understood."""
    found = _WAIT.search(text[:TEXT_CHARACTERS_MAX])
    unit = None if found is None else _UNIT_SECONDS.get(found[2].lower())
    return None if found is None or unit is None else as_seconds(float(found[1]) * unit)


def by_text(text: str, raw: Mapping[str, Any] | None = None) -> ProviderFailure:
    """Classify a failure of which only the text is known."""
    status = status_in(text)
    kind = kind_of_text(text) or kind_of_status(status) or ErrorKind.OTHER
    return ProviderFailure(kind, status=status, retry_after=wait_in(text), raw=raw)


def as_status(value: Any) -> int | None:
    """Return a value of a frame if it is an HTTP status of an error."""
    is_status = isinstance(value, int) and not isinstance(value, bool) and 400 <= value <= 599
    return value if is_status else None


def as_seconds(value: Any) -> float | None:
    """Return a value of a frame if it is a usable duration in seconds."""
    seconds = number(value)
    return None if seconds is None or seconds > WAIT_SECONDS_MAX else seconds


def as_time(value: Any) -> float | None:
    """Return a value of a frame if it is a usable time in seconds since 1970, UTC."""
    time = number(value)
    # Until the year 2286. A time in milliseconds is larger than that.
    return time if time and time < 1e10 else None


def shortened(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a failure for the log: plain values only, long texts cut."""
    kept = {
        name: cut(value, RAW_CHARACTERS_MAX) if isinstance(value, str) else value
        for name, value in fields.items()
        if isinstance(value, str) or _is_small(value)
    }
    return dict(list(kept.items())[:RAW_FIELDS_MAX])


def _is_small(value: Any) -> bool:
    # The code of a JSON-RPC error is negative.
    return isinstance(value, int | float) and abs(value) <= NUMBER_MAX
