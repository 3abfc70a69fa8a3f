"""Another model, another permission mode, another configuration, while the session lives.

A process that runs is told, and must answer in time: agents were seen to answer the first such request and never the
second. One that does not is replaced by a process that is started that way. Until it has answered, no prompt is sent:
whoever changes the model and then asks wants the answer of that model.
"""

from __future__ import annotations

from msgspec.structs import replace

from banksman.core.dialects.dialect import StatelessProtocol
from banksman.core.dialects.meaning import Replied
from banksman.core.session import event as kinds
from banksman.core.session import idle_process
from banksman.core.session.effects import SettingTaken
from banksman.core.session.facts import Reconfigured, SettingAsked, Timer
from banksman.core.session.state import Mode, PendingSetting, ProcessPhase, Replacement, Store, not_open
from banksman.core.session.transition import Transition
from banksman.errors import AgentError, BanksmanError, Closed, QueueFull

# Changes that the agent has not answered.
CHANGES_MAX = 16


def ask(work: Transition, fact: SettingAsked) -> None:
    state = work.state
    process = state.process
    if state.mode is not Mode.OPEN:
        work.do(SettingTaken(fact.change, not_open(state)))
    elif state.store is not Store.WORKING:
        work.do(SettingTaken(fact.change, state.store_error))
    elif len(process.changes) >= CHANGES_MAX:
        work.do(SettingTaken(fact.change, QueueFull(f"{CHANGES_MAX} changes are waiting", hint="try again later")))
    elif process.phase is ProcessPhase.STARTING and not process.is_there:
        # It waits for its place, and is started with this; or it was started a moment ago, and is told when it listens.
        _take(work, PendingSetting("", fact.change, fact.name, fact.value), by="start")
        request = f"setting-{process.number}-{process.requests + 1}"
        again = PendingSetting(request, "", fact.name, fact.value)
        others = tuple(change for change in process.changes if change.name != fact.name)
        work.set_process(requests=process.requests + 1, changes=(*others, again))
    elif process.phase in (ProcessPhase.READY, ProcessPhase.STARTING):
        request = f"setting-{process.number}-{process.requests + 1}"
        change = PendingSetting(request, fact.change, fact.name, fact.value)
        work.set_process(requests=process.requests + 1, changes=(*process.changes, change))
        if process.phase is ProcessPhase.READY:
            _tell(work, change)
    else:
        # The next one is started with all of them.
        _take(work, PendingSetting("", fact.change, fact.name, fact.value), by="start")


def tell_ready(work: Transition) -> None:
    """The process listens now: it is told what was changed while it started."""
    for change in work.state.process.changes:
        _tell(work, change)


def _tell(work: Transition, change: PendingSetting) -> None:
    config = work.state.config
    work.speak(None, lambda protocol: protocol.setting(change.request, change.name, change.value))
    work.start_timer(config.setting_seconds, Timer.SETTING, change.request)


def reconfigure(work: Transition, fact: Reconfigured) -> None:
    # So that a rest that has begun is measured by the new time.
    idle_process.wake(work)
    work.set(config=fact.config)
    if fact.opened is not None:
        # Whoever takes the session over opens it as the log says that it was opened the last time.
        work.log(None, kinds.SESSION_OPENED, **fact.opened)
    if fact.replaces:
        work.set_process(stale=Replacement.NOW)
        # What crashed was another.
        work.cancel_timer(Timer.BACKOFF, str(work.state.process.number))
        work.set(crashes=0, is_backing_off=False)
    idle_process.grow_old(work)
    for change in work.state.process.changes:
        if change.name in fact.drops:
            # Whatever is answered to it, it is no longer what is wished for.
            _forget(work, change)
            _told(work, change)
    for name in fact.drops:
        if name in dict(work.state.settings):
            work.set(settings=tuple(pair for pair in work.state.settings if pair[0] != name))
            work.log(None, kinds.SESSION_SETTING, name=name, value=None, by="opening")
    if fact.change:
        work.after_commit(SettingTaken(fact.change))


def on_reply(work: Transition, reply: Replied) -> None:
    change = _find(work, reply.request)
    if change is None:
        return
    _forget(work, change)
    if reply.error is not None:
        _told(work, change, AgentError(f"the agent refuses {change.name} {change.value!r}: {reply.error}"))
        return
    changes = work.state.process.changes
    for older in changes:
        # It answers in order, so it will not answer this one; and what came later is what is wished for.
        if older.name == change.name and _age(older) < _age(change):
            _forget(work, older)
            _told(work, older)
    _take(work, change, by="reply")


def expire(work: Transition, request: str) -> None:
    change = _find(work, request)
    if change is None:
        return
    _forget(work, change)
    if isinstance(work.state.process.protocol, StatelessProtocol):
        _take(work, change, by="respawn")
        work.set_process(stale=Replacement.NOW)
    else:
        # It takes its settings in words, and another process would be told the very same.
        seconds = work.state.config.setting_seconds
        _told(work, change, AgentError(f"the agent did not answer to {change.name} {change.value!r} in {seconds:g} s"))


def forget_all(work: Transition) -> None:
    """The process that was told is gone. The next one is started that way."""
    for change in work.state.process.changes:
        _forget(work, change)
        if work.keeps_queue:
            _take(work, change, by="respawn")
        else:
            _told(work, change, Closed("the session was closed before the agent had it"))


def _find(work: Transition, request: str) -> PendingSetting | None:
    return next((change for change in work.state.process.changes if change.request == request), None)


def _forget(work: Transition, change: PendingSetting) -> None:
    work.set_process(changes=tuple(other for other in work.state.process.changes if other is not change))
    work.cancel_timer(Timer.SETTING, change.request)


def _take(work: Transition, change: PendingSetting, *, by: str) -> None:
    kept = tuple(pair for pair in work.state.settings if pair[0] != change.name)
    work.state = replace(work.state, settings=(*kept, (change.name, change.value)))
    work.log(None, kinds.SESSION_SETTING, name=change.name, value=change.value, by=by)
    if change.id:
        work.after_commit(SettingTaken(change.id))


def _told(work: Transition, change: PendingSetting, error: BanksmanError | None = None) -> None:
    """Whoever waits for it, if anybody does."""
    if change.id:
        work.do(SettingTaken(change.id, error))


def _age(change: PendingSetting) -> int:
    """The number of its request: later ones are higher."""
    return int(change.request.rpartition("-")[2])
