"""How a command is run: checked at birth, so that a bad number is the caller's error and never a strange end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from banksman.core.ladder import Timings
from banksman.errors import UsageError
from banksman.run.output import OUTPUT_BYTES_MAX, SPILL_BYTES_MAX

OnOutput = Callable[[str, bytes], None]
Stdin = bytes | Literal["pipe", "inherit"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`timeout` and `idle_timeout` None: no limit. `stdin` None: /dev/null; bytes: written, then closed."""

    timeout: float | None = None
    idle_timeout: float | None = None
    grace: float = 5.0
    linger: float = 0.3
    drain: float = 2.0
    stdin: Stdin = None
    output_bytes_max: int = OUTPUT_BYTES_MAX
    output_total_max: int | None = None
    spill_bytes_max: int = SPILL_BYTES_MAX
    on_output: OnOutput | None = None

    def __post_init__(self) -> None:
        for name in ("timeout", "idle_timeout", "grace", "linger", "drain"):
            value = getattr(self, name)
            is_optional = name.endswith("timeout")
            if not (is_optional and value is None):
                _check_seconds(name, value)
            if is_optional and value == math.inf:
                object.__setattr__(self, name, None)
        for name in ("output_bytes_max", "output_total_max"):
            value = getattr(self, name)
            if not (name == "output_total_max" and value is None):
                _check_count(name, value)
        stdin: Any = self.stdin
        if isinstance(stdin, bytearray):
            object.__setattr__(self, "stdin", bytes(stdin))
        elif not (stdin is None or isinstance(stdin, bytes) or stdin in ("pipe", "inherit")):
            raise UsageError(
                f"stdin cannot be {stdin!r:.60}", hint='None, bytes, "pipe" or "inherit"; encode text to bytes'
            )
        on_output: Any = self.on_output
        if on_output is not None and not callable(on_output):
            raise UsageError("on_output must be a function of (stream, data)")

    @property
    def timings(self) -> Timings:
        return Timings(grace=self.grace, linger=self.linger, drain=self.drain)


def _check_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} must be a number of seconds, not {value!r}")
    if math.isnan(value) or value < 0:
        raise UsageError(f"{name} cannot be {value!r}", hint="a number of seconds, 0 or more")
    if math.isinf(value) and not name.endswith("timeout"):
        raise UsageError(f"{name} cannot be endless", hint="every wait of the stop ladder has an end")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number of bytes, not {value!r}")
    if value < 0:
        raise UsageError(f"{name} cannot be negative: {value!r}")
