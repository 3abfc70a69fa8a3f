"""The environment of a child: what it inherits, what is taken out, what is added.

Three policies can be named in `scrub`. `"banksman"` removes our own variables (`BANKSMAN_…`): they may hold the token
of a server, or the address of a store. Agents never inherit those.

`"nesting"` removes the variables by which an agent notices that it runs inside another one and then behaves differently
or refuses to start. `"secrets"` removes credentials, by the list and the endings below; it is a help against leaks by
accident and no boundary. Any other word names one variable. What the caller puts into `env` is always kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, cast

from banksman.errors import UsageError

NESTING = frozenset(
    (
        *("CLAUDECODE", "CLAUDE_CODE_ENTRYPOINT", "CLAUDE_CODE_SSE_PORT", "CLAUDE_CODE_SESSION_ID"),
        *("CLAUDE_CODE_CHILD_SESSION", "CLAUDE_AGENT_SDK_VERSION", "CODEX_SANDBOX", "CODEX_SANDBOX_NETWORK_DISABLED"),
        *("CODEX_THREAD_ID", "GEMINI_CLI", "GEMINI_CLI_NO_RELAUNCH", "QWEN_CODE", "QWEN_CODE_NO_RELAUNCH"),
        *("OPENCODE", "OPENCODE_PID", "COPILOT_CLI", "GOOSE_TERMINAL"),
    )
)
SECRETS = frozenset(
    (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"),
        *("DATABASE_URL", "PGPASSWORD", "MYSQL_PWD", "NPM_TOKEN", "SSH_AUTH_SOCK", "GPG_AGENT_INFO"),
    )
)
SECRET_ENDINGS = ("_API_KEY", "_TOKEN", "_SECRET", "_PASSWORD", "_PASSWD", "_CREDENTIALS", "_PRIVATE_KEY")

_NOTHING: Mapping[bytes, bytes | None] = {}


def build(
    env: Mapping[str, str] | None,
    *,
    inherit: bool,
    scrub: Iterable[str] = (),
    ours: Mapping[bytes, bytes | None] = _NOTHING,
) -> dict[bytes, bytes]:
    """The child's whole environment, as the kernel takes it. `ours` goes over what is inherited (None: it goes), and
    what the caller says goes over ours."""
    words = _words(scrub)
    # os.environb is read at the call, and not through a copy made earlier: the program may have changed it since.
    built = dict(os.environb) if inherit else {}
    if words:
        built = {name: value for name, value in built.items() if not _is_scrubbed(os.fsdecode(name), words)}
    for name, value in ours.items():
        built.pop(name, None)
        if value is not None:
            built[name] = value
    for name, value in _checked(env).items():
        try:
            built[os.fsencode(name)] = os.fsencode(value)
        except UnicodeEncodeError as exc:
            hint = "text in an environment must be encodable; see sys.getfilesystemencoding()"
            raise UsageError(f"env holds {name!r}: {value!r}, which cannot be encoded", hint=hint) from exc
    return built


def _words(scrub: Any) -> frozenset[str]:
    hint = 'a list of "banksman", "nesting", "secrets" and names of variables'
    if isinstance(scrub, str) or not isinstance(scrub, Iterable):
        raise UsageError(f"scrub cannot be {scrub!r}", hint=hint)
    words = frozenset(cast(Iterable[Any], scrub))
    for word in words:
        if not isinstance(word, str):
            raise UsageError(f"scrub cannot hold {word!r}", hint=hint)
    return words


def _is_scrubbed(name: str, scrub: frozenset[str]) -> bool:
    if "nesting" in scrub and name in NESTING:
        return True
    if "banksman" in scrub and name.startswith("BANKSMAN_"):
        return True
    if "secrets" in scrub and (name in SECRETS or name.upper().endswith(SECRET_ENDINGS)):
        return True
    return name in scrub


def _checked(env: Any) -> Mapping[str, str]:
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise UsageError(f"env cannot be {env!r:.60}", hint="a mapping of names to values, both text")
    items = cast(Mapping[Any, Any], env)
    for name, value in items.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(
                f"env holds {name!r}: {value!r}, and both must be text", hint="write numbers and paths as str(…)"
            )
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise UsageError(f"env holds the impossible entry {name!r}", hint="a name is not empty and has no = or NUL")
    return items
