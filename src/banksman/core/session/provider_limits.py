"""Retries, account limits and failures that the provider causes, applied to the session.

A retry and a changed limit are logged. A retry postpones the watchdogs of silence, because the
agent is known to wait. The limit of a failed turn is completed from the known usage windows: Codex
and Claude Code report the time of the reset there, and not with the error.
"""

from __future__ import annotations

from msgspec.structs import replace

from banksman.core.dialects.meaning import LimitsReported, ProviderFailure, Retrying, TurnOver
from banksman.core.session import account_limits, watchdogs
from banksman.core.session import event as kinds
from banksman.core.session.account_limits import Windows
from banksman.core.session.effects import ReportLimit
from banksman.core.session.transition import Transition
from banksman.core.session.turn import PendingRetry
from banksman.core.session.watchdogs import ClockName
from banksman.errors import AgentError, ErrorKind

# A longer delay counts as this one. Without a bound, one frame could suspend the watchdogs forever.
RETRY_SECONDS_MAX = 3600.0
_OTHER = ProviderFailure(ErrorKind.OTHER)


def on_retry(work: Transition, retry: Retrying) -> None:
    """Log a retry of the open turn, and remember when it is due."""
    turn = work.state.speaking
    work.log(
        work.speaker,
        kinds.PROVIDER_RETRYING,
        attempt=retry.attempt,
        attempts_max=retry.attempts_max,
        delay=retry.delay,
        cause=retry.cause,
        error=retry.kind,
        status=retry.status,
    )
    if turn is not None:
        due = work.at + min(retry.delay or 0.0, RETRY_SECONDS_MAX)
        work.set_turn(replace(turn, retry=PendingRetry(retry, due)))


def end_retry(work: Transition) -> bool:
    """Forget the retry of the open turn after progress. Return whether there was one."""
    turn = work.state.speaking
    if turn is None or turn.retry is None:
        return False
    work.set_turn(replace(turn, retry=None))
    return True


def feed_clocks(work: Transition, *, has_progress: bool) -> None:
    """Reset the clocks that wait for output. While a retry is due, they start at that time."""
    turn = work.state.speaking
    retry = None if turn is None else turn.retry
    since = work.at if retry is None else max(work.at, retry.due)
    is_fed = has_progress or retry is not None
    names = (ClockName.BYTES, ClockName.PROGRESS) if is_fed else (ClockName.BYTES,)
    work.set(clocks=watchdogs.wind(work.state.clocks, since, *names))


def on_limits(work: Transition, told: LimitsReported) -> None:
    """Log the usage windows of the account if a report changes them."""
    known = work.state.limits
    windows = account_limits.merge(known, told.windows)
    if windows != known:
        work.set(limits=windows)
        until = account_limits.limited_until(windows)
        # A report that changes no limit says nothing about one that has another source: the error
        # of a turn, or another session of the account.
        if until != account_limits.limited_until(known):
            work.set(limited_until=until)
            work.do(ReportLimit(until, work.state.config.agent))
        log_limits(work, windows, work.state.limited_until)


def log_limits(
    work: Transition,
    windows: Windows,
    until: float | None,
    *,
    by: str = "agent",
    agent: str | None = None,
) -> None:
    """Log the known usage windows. `by`: their source, the agent or another session ("account").

    `agent`: the agent of the account, if another one serves the session now.
    """
    told = account_limits.as_json(windows)
    work.log(None, kinds.LIMITS_CHANGED, windows=told, limited_until=until, by=by, agent=agent)


def error_of(work: Transition, boundary: TurnOver, turn: str) -> AgentError:
    """Return the error of a failed turn."""
    failure = boundary.failure or _OTHER
    until = failure.limited_until
    if until is None and failure.kind is ErrorKind.USAGE_LIMIT:
        until = account_limits.limited_until(work.state.limits)
    return AgentError(
        boundary.error or "the agent reports an error",
        hint=work.state.config.hint_of(failure.kind),
        kind=failure.kind,
        status=failure.status,
        retry_after=failure.retry_after,
        limited_until=until,
        raw=failure.raw,
        turn=turn,
    )
