"""Let the queue wait until a limit of the agent's account has ended (`on_limit`).

- `look` runs after every fact. It begins a wait when the account is known to be limited, and ends
  it when the limit is lifted or the session is opened again with `on_limit="fail"`. So a wait also
  begins after a restart, because `limited_until` is durable.
- While the queue waits, `grants.py` grants no turn, starts no process and preempts nothing.
- A wait ends when the wall clock has passed the end of the limit. The driver knows the clock.
- `retry_of` decides whether a turn that failed by a limit is asked again. It is not if a tool ran,
  if a background task runs, or if the end of the limit is unknown.
- `on_account` takes over a limit that another session of the same account met.
- A session with fall-backs waits only while none of its agents can serve. An ask that only one of
  them supports may wait alone: see `wait_of` and fallback.py. No function decides about that ask.
"""

from __future__ import annotations

from banksman.core.session import fallback, provider_limits
from banksman.core.session.effects import CallOnLimit, ReportLimit, StartTimer, WaitUntil
from banksman.core.session.facts import Timer
from banksman.core.session.outcome import Kind, Outcome
from banksman.core.session.state import AgentLimit, LimitWait, Mode, Session
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Turn
from banksman.errors import AgentError, ErrorKind

# How often one ask is sent again after a limit. A provider whose limits end in the past must not
# make the session send it forever.
REQUEUES_MAX = 3
_LIMITS = (ErrorKind.USAGE_LIMIT, ErrorKind.RATE_LIMITED)


def look(work: Transition) -> None:
    """Begin or end the wait that the known limit of the account calls for."""
    state = work.state
    wait, until = state.limit_wait, state.limited_until
    has_limit = until is not None or wait is not None or state.limit_met is not None
    has_decided = state.limit_passed is not None or state.limit_failed is not None
    if state.mode is not Mode.OPEN or not (has_limit or has_decided):
        return
    _forget(work)
    if state.config.on_limit == "fail":
        _end(work)
    elif (
        until is None
        or until in (work.state.limit_passed, work.state.limit_failed)
        or fallback.has_other(state)
    ):
        # A delay that the provider named is no known limit of the account. Its timer ends it.
        if wait is not None and wait.until is not None:
            _end(work)
    elif wait is None or wait.until != until:
        _begin(work, LimitWait(repr(until), until))


def _forget(work: Transition) -> None:
    """Forget what was decided about a limit that is over, or under another configuration."""
    state = work.state
    is_over = state.limited_until is None or state.config.on_limit == "fail"
    if is_over and state.limit_passed is not None:
        work.set(limit_passed=None)
    if (is_over or state.config.on_limit != "call") and state.limit_failed is not None:
        work.set(limit_failed=None)
    if state.limited_until is None and state.limit_met is not None:
        work.set(limit_met=None)


def _begin(work: Transition, wait: LimitWait) -> None:
    _end(work)
    work.set(limit_wait=wait)
    subject = (Timer.LIMIT, wait.key)
    if wait.until is not None:
        seconds_min = fallback.resend_seconds(work.state, wait.until)
        work.do(WaitUntil(wait.until, subject, work.state.config.agent, seconds_min))
    else:
        assert wait.retry_after is not None
        work.do(StartTimer(work.at + wait.retry_after, subject))
    call(work)


def call(work: Transition) -> None:
    """Let the caller's function decide about the wait, if there are both."""
    state, wait = work.state, work.state.limit_wait
    if wait is not None and work.is_open and state.config.on_limit == "call":
        turns = (turn for turn in state.queue if isinstance(turn, Turn))
        waiting = tuple(ask.id for turn in turns for ask in turn.asks)
        agent = fallback.current(state)
        work.do(CallOnLimit(wait.key, error_of(wait), state.limits, waiting, agent))


def _end(work: Transition) -> None:
    if work.state.limit_wait is not None:
        work.cancel_timer(Timer.LIMIT, work.state.limit_wait.key)
        work.set(limit_wait=None)


def expire(work: Transition, key: str) -> None:
    """End a wait whose time has come. A timer of an earlier wait has another key."""
    wait = work.state.limit_wait
    if wait is not None and wait.key == key:
        passed = work.state.limit_passed if wait.until is None else wait.until
        work.set(limit_wait=None, limit_passed=passed)


def give_up(work: Transition, key: str) -> LimitWait | None:
    """End a wait because the caller decided so. Return it; None if it was over already.

    The queue does not wait again for the end of this limit.
    """
    wait = work.state.limit_wait
    if wait is None or wait.key != key or not work.is_open:
        return None
    _end(work)
    if wait.until is not None:
        work.set(limit_failed=wait.until)
    return wait


def error_of(wait: LimitWait) -> AgentError:
    """Return the error of an ask that a limit has kept waiting."""
    return AgentError(
        "the agent's account is limited",
        kind=ErrorKind.RATE_LIMITED if wait.until is None else ErrorKind.USAGE_LIMIT,
        retry_after=wait.retry_after,
        limited_until=wait.until,
    )


def wait_of(state: Session, turn: Turn) -> LimitWait | None:
    """Return the wait that keeps a turn from being sent, of the whole queue or of this turn."""
    until = fallback.awaited_limit(state, turn)
    return state.limit_wait if until is None else LimitWait(repr(until), until)


# -- limits that the agent or another session reports --------------------------------------------
def on_account(work: Transition, until: float | None, agent: str) -> None:
    """Record the limit that another session of the account has met, or that it has ended.

    A session that neither waits nor falls back learns of a limit only from its own agent.
    """
    state = work.state
    serving = fallback.current(state)
    known = fallback.state_of(state, agent or serving)
    is_for_us = state.config.on_limit != "fail" or fallback.owner(state) is not None
    if not is_for_us or until == known.limited_until:
        return
    other = agent if agent not in ("", serving) else None
    if other is None:
        work.set(limited_until=until)
    else:
        work.state = fallback.noted(state, other, limited_until=until)
    provider_limits.log_limits(work, known.limits, until, by="account", agent=other)


def on_outcome(work: Transition, turn: Turn, outcome: Outcome) -> None:
    """Report a limit that a turn has met, or that the account answers again.

    The answer of a turn that began before the limit was known does not prove to other sessions that
    the limit has ended.
    """
    told = outcome.error.limited_until if isinstance(outcome.error, AgentError) else None
    if told is not None:
        # The provider may name a time that has passed. That is a new wait, for this agent too.
        passed = AgentLimit(fallback.current(work.state), told, is_over=True)
        waits = tuple(wait for wait in work.state.agent_limits if wait != passed)
        work.set(limit_passed=None, agent_limits=waits, limit_met=told)
        work.do(ReportLimit(told, work.state.config.agent))
    elif (
        outcome.kind is Kind.DONE
        and work.state.limited_until is not None
        and work.state.limited_until == turn.limited_until
    ):
        work.do(ReportLimit(None, work.state.config.agent))


# -- turns that met a limit ----------------------------------------------------------------------
def retry_of(work: Transition, turn: Turn, outcome: Outcome) -> LimitWait | None:
    """Return the wait after which a failed turn is asked again; None if it stays failed."""
    state, error = work.state, outcome.error
    if (
        state.config.on_limit == "fail"
        or outcome.kind is not Kind.FAILED
        or not isinstance(error, AgentError)
        or error.kind not in _LIMITS
    ):
        return None
    # A tool may have changed something, and the agent could do it again.
    had_effect = turn.used_tools or bool(outcome.background)
    # A caller, a deadline or a close wants the end of the turn, or of one of its asks.
    is_unwanted = turn.cause is not None or turn.wish is not None or bool(turn.unwanted)
    assert turn.ask is not None
    may_wait = work.keeps_queue and not turn.ask.is_last and turn.limit_waits < REQUEUES_MAX
    if had_effect or is_unwanted or not may_wait or turn.attempt >= state.config.attempts_max:
        return None
    until = error.limited_until
    if until is None and state.limit_wait is not None:
        until = state.limit_wait.until
    if until is not None:
        return None if until == state.limit_failed else LimitWait(repr(until), until)
    if error.retry_after is None:
        return None  # The end of the limit is unknown, and is never guessed.
    return LimitWait(f"after {turn.key}", None, error.retry_after)


def begin_retry(work: Transition, wait: LimitWait) -> None:
    """Begin the wait of a turn that was requeued."""
    if wait.until is not None:
        work.set(limited_until=wait.until)  # `look` begins the wait.
    elif work.state.limit_wait is None and work.is_open:
        _begin(work, wait)
