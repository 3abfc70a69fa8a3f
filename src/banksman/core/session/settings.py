"""Change the model, the permission mode or the configuration of a live session.

A running process is sent the change and must answer in time: some agents answer the first such
request and never the second. If the dialect is stateless (Claude), a process that does not answer
is replaced by one that is started with the change. With any other dialect, the caller gets an
error. No prompt is sent before the answer, because a caller that changes the model and then asks
wants an answer from that model. A new configuration comes from a reopen of the session.
"""

from __future__ import annotations

from collections.abc import Collection

from banksman.core.dialects.dialect import StatelessProtocol
from banksman.core.dialects.meaning import Replied
from banksman.core.session import event as kinds
from banksman.core.session import fallback, idle_process, limit_wait
from banksman.core.session.effects import SettingTaken
from banksman.core.session.facts import Reconfigured, SettingAsked, ShareAsked, Timer
from banksman.core.session.state import (
    Mode,
    PendingSetting,
    ProcessPhase,
    Replacement,
    Store,
    not_open,
)
from banksman.core.session.transition import Transition
from banksman.errors import AgentError, BanksmanError, Closed, QueueFull

# Limit on changes that the agent has not answered.
CHANGES_MAX = 16


def ask(work: Transition, fact: SettingAsked) -> None:
    """Apply a change of a setting, now or with the next process."""
    state = work.state
    process = state.process
    if state.mode is not Mode.OPEN:
        work.do(SettingTaken(fact.change, not_open(state)))
    elif state.store is not Store.WORKING:
        work.do(SettingTaken(fact.change, state.store_error))
    elif len(process.changes) >= CHANGES_MAX:
        message = f"{CHANGES_MAX} changes of settings are waiting"
        work.do(SettingTaken(fact.change, QueueFull(message, hint="try again later")))
    elif process.phase is ProcessPhase.STARTING and not process.is_there:
        # The process may still wait for its place; it then starts with this setting. Or it was
        # started a moment ago, and gets the change when it is ready. So both are prepared.
        _take(work, PendingSetting("", fact.change, fact.name, fact.value, fact.caller), by="start")
        request = f"setting-{process.number}-{process.requests + 1}"
        again = PendingSetting(request, "", fact.name, fact.value, fact.caller)
        others = tuple(change for change in process.changes if change.name != fact.name)
        work.set_process(requests=process.requests + 1, changes=(*others, again))
    elif process.phase in (ProcessPhase.READY, ProcessPhase.STARTING):
        request = f"setting-{process.number}-{process.requests + 1}"
        change = PendingSetting(request, fact.change, fact.name, fact.value, fact.caller)
        work.set_process(requests=process.requests + 1, changes=(*process.changes, change))
        if process.phase is ProcessPhase.READY:
            _tell(work, change)
    else:
        # The next process is started with all settings.
        _take(work, PendingSetting("", fact.change, fact.name, fact.value, fact.caller), by="start")


def tell_ready(work: Transition) -> None:
    """Send the process the changes that were made while it started."""
    for change in work.state.process.changes:
        _tell(work, change)


def _tell(work: Transition, change: PendingSetting) -> None:
    config = work.state.config
    work.speak(None, lambda protocol: protocol.setting(change.request, change.name, change.value))
    work.start_timer(config.setting_seconds, Timer.SETTING, change.request)


def reconfigure(work: Transition, fact: Reconfigured) -> None:
    """Apply a new configuration after the session was reopened."""
    # End the current idle time, so that the new one is measured with the new limit.
    idle_process.wake(work)
    if fact.opened is not None:
        # A host that takes the session over opens it with the last logged spec.
        work.log(None, kinds.SESSION_OPENED, **fact.opened)
    had_function = work.state.config.on_limit == "call"
    fallback.reconfigure(work, fact.config)
    if not had_function:
        limit_wait.call(work)  # The queue may wait already.
    if fact.replaces:
        work.set_process(stale=Replacement.NOW)
        # The crashes were those of another configuration.
        work.cancel_timer(Timer.BACKOFF, str(work.state.process.number))
        work.set(crashes=0, is_backing_off=False)
    idle_process.grow_old(work)
    _drop(work, fact.drops)
    if fact.change:
        work.after_commit(SettingTaken(fact.change))


def share(work: Transition, fact: ShareAsked) -> None:
    """Log the callers that the session is shared with. No agent needs to know them."""
    if work.state.mode is not Mode.OPEN:
        work.do(SettingTaken(fact.change, not_open(work.state)))
    elif work.state.store is not Store.WORKING:
        work.do(SettingTaken(fact.change, work.state.store_error))
    else:
        work.log(None, kinds.SESSION_SHARED, shared=fact.shared, caller=fact.caller)
        work.after_commit(SettingTaken(fact.change))


def _drop(work: Transition, names: Collection[str]) -> None:
    """Return settings to the values of the reopen, which are those of the first agent."""
    first = fallback.first(work.state).agent
    is_serving = first == fallback.current(work.state)
    for change in work.state.process.changes if is_serving else ():
        if change.name in names:
            # The setting is dropped, so the agent's reply to this change does not matter.
            _forget(work, change)
            _told(work, change)
    agent = None if is_serving else first
    for name in names:
        if name in dict(fallback.state_of(work.state, first).settings):
            work.state = fallback.with_setting(work.state, name, None, agent)
            work.log(None, kinds.SESSION_SETTING, name=name, value=None, by="opening", agent=agent)


def on_reply(work: Transition, reply: Replied) -> None:
    """Handle the agent's reply to a change."""
    change = _find(work, reply.request)
    if change is None:
        return
    _forget(work, change)
    if reply.error is not None:
        message = f"the agent refused {change.name} {change.value!r}: {reply.error}"
        _told(work, change, AgentError(message))
        return
    changes = work.state.process.changes
    for older in changes:
        # The agent answers in order, so it will not answer this older change. The later value
        # counts.
        if older.name == change.name and _age(older) < _age(change):
            _forget(work, older)
            _told(work, older)
    _take(work, change, by="reply")


def expire(work: Transition, request: str) -> None:
    """Handle a change that the agent did not answer in time."""
    change = _find(work, request)
    if change is None:
        return
    _forget(work, change)
    if isinstance(work.state.process.protocol, StatelessProtocol):
        _take(work, change, by="respawn")
        work.set_process(stale=Replacement.NOW)
    else:
        # This agent takes settings only as requests, and another process would get the very same
        # one.
        seconds = work.state.config.setting_seconds
        what = f"{change.name} {change.value!r}"
        _told(work, change, AgentError(f"the agent did not confirm {what} within {seconds:g} s"))


def forget_all(work: Transition) -> None:
    """Apply the open changes of a process that is gone: the next process is started with them."""
    for change in work.state.process.changes:
        _forget(work, change)
        if work.keeps_queue:
            _take(work, change, by="respawn")
        else:
            _told(work, change, Closed("the session was closed before the agent got the setting"))


def _find(work: Transition, request: str) -> PendingSetting | None:
    return next(
        (change for change in work.state.process.changes if change.request == request), None
    )


def _forget(work: Transition, change: PendingSetting) -> None:
    work.set_process(
        changes=tuple(other for other in work.state.process.changes if other is not change)
    )
    work.cancel_timer(Timer.SETTING, change.request)


def _take(work: Transition, change: PendingSetting, *, by: str) -> None:
    work.state = fallback.with_setting(work.state, change.name, change.value)
    told = {"name": change.name, "value": change.value, "by": by, **kinds.named(change.caller)}
    work.log(None, kinds.SESSION_SETTING, **told)
    if change.id:
        work.after_commit(SettingTaken(change.id))


def _told(work: Transition, change: PendingSetting, error: BanksmanError | None = None) -> None:
    """Notify the caller of a change, if one waits."""
    if change.id:
        work.do(SettingTaken(change.id, error))


def _age(change: PendingSetting) -> int:
    """Return the number of the request: later ones are higher."""
    return int(change.request.rpartition("-")[2])
