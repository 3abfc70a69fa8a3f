"""The numbers of a session: what the profile says, and what the caller wants instead.

`options` (seconds, unless they say otherwise): `drain_seconds`, `settle_seconds`, `start_seconds`, `write_seconds`,
`ageing_seconds`, `hold_idle_seconds`, `collect_seconds`, `queue_max`, `when_full` ("refuse" or "drop"), `attempts_max`
(how often an ask that gives way comes back), `clocks` (a mapping from the watchdog's name), the ladder's `eof_grace`,
`grace`, `linger` and `drain`, and `frame_bytes_max`, beyond which a frame from the agent goes to a file.
`quiet_seconds`: how long the agent must be quiet after its boundary before the turn is over. `after_interrupt`: what
becomes of tools that it leaves running when it is interrupted ("sweep": they are ended, or "keep": only reported).

Of questions: `question_seconds` (None: they wait), `question_default` ("deny" or "allow": what it is when nobody has
answered by then), `question_after_crash` ("withdraw", or "keep": it is still there when the session is taken over, and
what is answered then is given when the agent asks the same again). Of settings: `setting_seconds`. Of the process:
`idle_seconds` (None: it is kept), `recycle_seconds` (None: it may grow old) with `save_prompt`, `backoff_seconds` and
`backoff_seconds_max`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.clocks import Name
from banksman.core.config import Config
from banksman.core.dialects.dialect import PLAIN
from banksman.core.framing import FRAME_BYTES_MAX
from banksman.core.ladder import Timings
from banksman.errors import UsageError
from banksman.run.commands.options import SECONDS_MAX, check_seconds
from banksman.run.sessions.profile import AFTER_INTERRUPT, QUIET_SECONDS_MAX, Profile

LADDER = {"eof_grace": "eof", "grace": "grace", "linger": "linger", "drain": "drain"}
# Each ask is placed by a look at all that wait: a queue of more is a sign of something else.
QUEUE_MAX_MAX = 4096
COUNTS = ("queue_max", "attempts_max", "frame_bytes_max")
WORDS = {
    "when_full": ("refuse", "drop"),
    "question_default": ("deny", "allow"),
    "question_after_crash": ("withdraw", "keep"),
    "after_interrupt": AFTER_INTERRUPT,
}
# Waits that there need not be.
OPTIONAL = ("question_seconds", "idle_seconds", "recycle_seconds")
SECONDS = tuple(name for name in Config.__struct_fields__ if name.endswith(("_seconds", "_seconds_max")))
KNOWN = (*SECONDS, *COUNTS, *LADDER, *WORDS, "clocks", "save_prompt")


class Numbers(Struct, frozen=True, kw_only=True):
    timings: Timings
    frame_bytes_max: int
    _config: Config

    def config(self, **more: Any) -> Config:
        return replace(self._config, **more)


def read(profile: Profile, options: Mapping[str, Any]) -> Numbers:
    clocks: dict[str, float | None] = dict(profile.clocks)
    ladder: dict[str, float] = {}
    found: dict[str, Any] = {
        "drain_seconds": profile.drain_seconds,
        "quiet_seconds": profile.quiet_seconds,
        "leaves_tools": profile.leaves_tools,
        "after_interrupt": profile.after_interrupt,
    }
    for key, value in options.items():
        if key == "clocks":
            clocks.update(_clocks(value))
        elif key in LADDER:
            check_seconds(key, value)
            ladder[LADDER[key]] = min(value, SECONDS_MAX)
        else:
            _check(key, value)
            if key == "save_prompt" and value is not None:
                # What cannot be sent is refused now, and not when it is due.
                profile.dialect.begin(PLAIN).prompt("", value)
            found[key] = value
    start = clocks.pop(Name.START, None)
    if start is not None:
        found.setdefault("start_seconds", start)
    return Numbers(
        timings=dataclasses.replace(profile.timings, **ladder),
        frame_bytes_max=found.pop("frame_bytes_max", FRAME_BYTES_MAX),
        _config=Config(dialect=profile.dialect, clocks=clocks, **found),
    )


def _check(key: str, value: Any) -> None:
    if key in WORDS:
        if value not in WORDS[key]:
            raise UsageError(f"{key} cannot be {value!r:.60}", hint=" or ".join(f'"{word}"' for word in WORDS[key]))
    elif key in COUNTS:
        _check_count(key, value)
    elif key == "save_prompt":
        if value is not None and (not isinstance(value, str) or not value):
            raise UsageError(f"save_prompt cannot be {value!r:.60}", hint="text, or None")
    elif key not in SECONDS:
        raise UsageError(f"there is no option {key!r}", hint=f"known are: {', '.join(sorted(KNOWN))}")
    elif value is not None or key not in OPTIONAL:
        check_seconds(key, value)
        if key == "recycle_seconds" and value == 0:
            raise UsageError("recycle_seconds cannot be 0", hint="None turns it off")
        if value is not None and value > (QUIET_SECONDS_MAX if key == "quiet_seconds" else SECONDS_MAX):
            hint = "None turns it off" if key in OPTIONAL else "every wait has an end"
            raise UsageError(f"{key} cannot be {value!r:.60}", hint=hint)


def _check_count(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key} cannot be {value!r:.60}", hint="a whole number, 1 or more")
    if key == "queue_max" and value > QUEUE_MAX_MAX:
        raise UsageError(f"queue_max cannot be more than {QUEUE_MAX_MAX}", hint="refuse earlier, or open more sessions")


def _clocks(value: Any) -> dict[str, float | None]:
    names = [str(name) for name in Name]
    if not isinstance(value, Mapping) or not all(key in names for key in value):  # pyright: ignore[reportUnknownVariableType]
        raise UsageError(
            f"clocks cannot be {value!r:.60}", hint=f"a mapping from {', '.join(names)} to seconds or None"
        )
    wanted: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
    for key, seconds in wanted.items():
        if seconds is not None:
            check_seconds(key, seconds)
            if seconds == 0:
                raise UsageError(f"the clock {key} cannot be 0", hint="None turns it off")
    return dict(wanted)
