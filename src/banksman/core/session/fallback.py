"""Fall back to another agent between turns, while an earlier one is limited or not installed.

A session has a list of agents, the roster of its configuration. `choose` names the agent for the
next turn: the first of the list that is neither limited nor missing. `switch` changes to it while
no process runs, so never within a turn. `grants.py` calls both, just before it grants a turn.

Each agent keeps its own conversation, cost, settings and limits (`AgentState`). Those of the agent
that serves now are members of `Session`; those of the others are in `Session.agents`.

A turn whose prompt was sent stays with its agent (`Turn.agent`), because its tools may have run.
An ask goes only to an agent that supports its schema and its content. While only limited agents
can serve it, it waits, and the other asks are served (`awaited_limit`).

- Limited: the end of the agent's limit (`limited_until`, wall clock) has not passed. This module
  knows no clock. It has the driver wait (`WaitUntil`), and the agent counts as limited until then.
- Missing: its program was not found at a start. It is tried again after a reopen or a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict, replace

from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import Hold, Queue
from banksman.core.session.effects import HoldConversation, WaitUntil
from banksman.core.session.facts import Timer
from banksman.core.session.session_config import Config
from banksman.core.session.state import AgentLimit, AgentState, ProcessPhase, Session
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Turn
from banksman.errors import BanksmanError, ProgramNotFound

# Capability that an agent needs for each kind of content in a prompt. All agents accept text and
# links.
CONTENT = {"image": "images", "audio": "audio"}
# The part of a configuration that describes a running process, whatever a reopen changes.
OF_PROCESS = (
    "agent",
    "capabilities",
    "dialect",
    "setup",
    "quiet_seconds",
    "leaves_tools",
    "serves_terminals",
    "scrubbed",
)

# Delay before an ask is sent again to an agent that named the passed end of a limit.
RESEND_SECONDS = 5.0


# -- agents of a session -------------------------------------------------------------------------
def config_of(config: Config, agent: str | None) -> Config:
    """Return the configuration of an agent of the roster; the given one if it is not there."""
    found = next((each for each in config.roster if each.agent == agent), None)
    if found is None:
        return config
    return replace(found, roster=config.roster, shares_budget=config.shares_budget)


def first(state: Session) -> Config:
    """Return the configuration of the session's first agent."""
    return state.config.roster[0] if state.config.roster else state.config


def current(state: Session) -> str:
    """Return the agent that serves the session now."""
    return state.agent or first(state).agent


def state_of(state: Session, agent: str) -> AgentState | Session:
    """Return the state of an agent of the session: its conversation, settings and limits."""
    return state if agent == current(state) else dict(state.agents).get(agent, AgentState())


def limited_until(state: Session, agent: str) -> float | None:
    """Return the end of an agent's last known limit, which may have passed."""
    return state_of(state, agent).limited_until


def is_limited(state: Session, agent: str) -> bool:
    """Whether the limit of an agent is not known to have ended."""
    until = limited_until(state, agent)
    return until is not None and AgentLimit(agent, until, is_over=True) not in state.agent_limits


def can_serve(config: Config, turn: Turn) -> bool:
    """Whether an agent supports everything that the asks of a turn need."""
    if config.capabilities is None:
        return True
    needs = {"schema"} if any(ask.schema is not None for ask in turn.asks) else set[str]()
    if not isinstance(turn.prompt, str):
        needs |= {CONTENT[kind] for block in turn.prompt if (kind := _kind(block)) in CONTENT}
    return needs <= config.capabilities


def _kind(block: Mapping[str, Any]) -> str:
    kind = block.get("type")
    return kind if isinstance(kind, str) else ""


# -- the decision --------------------------------------------------------------------------------
def choose(state: Session, turn: Turn) -> str:
    """Return the agent that is to serve a queued turn."""
    roster = state.config.roster
    if not roster or (turn.ask is not None and turn.ask.is_last):
        return current(state)  # A save prompt is for the running process only.
    if turn.agent is not None:
        return turn.agent
    if len(roster) == 1:
        return roster[0].agent
    able = [each.agent for each in roster if can_serve(each, turn)] or [roster[0].agent]
    present = [agent for agent in able if agent not in state.missing] or able[:1]
    free = [agent for agent in present if not is_limited(state, agent)]
    if not free:
        return min(present, key=lambda agent: limited_until(state, agent) or 0.0)
    process = state.process
    if current(state) in free and (process.tasks or state.questions or state.callbacks):
        return current(state)  # It serves well, and a change would end its background tasks.
    return free[0]


def has_other(state: Session) -> bool:
    """Whether another agent than the current one can serve."""
    names = [each.agent for each in state.config.roster if each.agent != current(state)]
    return any(name not in state.missing and not is_limited(state, name) for name in names)


def must_leave(state: Session, turn: Turn) -> bool:
    """Whether another agent must serve a granted turn, because the limit became known since."""
    agent = current(state)
    return choose(state, turn) != agent and is_limited(state, agent)


def awaited_limit(state: Session, turn: Turn) -> float | None:
    """Return the end of the limit that a turn waits for while other turns are served.

    Only a limited agent can serve such a turn, and another agent is free. None: the turn does not
    wait so. If no agent is free, the whole queue waits: see limit_wait.py.
    """
    roster = state.config.roster
    if len(roster) < 2 or state.config.on_limit == "fail" or is_lost(state, turn):
        return None
    agent = choose(state, turn)
    until = limited_until(state, agent)
    is_decided = agent == current(state) and until == state.limit_failed
    if is_decided or not is_limited(state, agent):
        return None
    others = (each.agent for each in roster if each.agent not in state.missing)
    return until if any(not is_limited(state, other) for other in others) else None


def servable(state: Session, queue: Queue) -> Queue:
    """Return the queue without the turns that wait for the limit of one agent."""
    if len(state.config.roster) < 2:
        return queue
    return tuple(
        waiting
        for waiting in queue
        if isinstance(waiting, Hold) or awaited_limit(state, waiting) is None
    )


def owner(state: Session) -> str | None:
    """Return the agent that a turn must stay with once its prompt was sent; None: there is one."""
    is_alone = len(state.config.roster) < 2 and state.agent is None
    return None if is_alone else current(state)


def is_lost(state: Session, turn: Turn) -> bool:
    """Whether a turn belongs to an agent that the session does not have since it was reopened."""
    roster = state.config.roster
    return turn.agent is not None and turn.agent not in [each.agent for each in roster]


# -- the change ----------------------------------------------------------------------------------
def switch(work: Transition, agent: str) -> None:
    """Let another agent serve the session from now on. No process may run."""
    state = work.state
    before = current(state)
    if agent == before:
        return
    why = _why(state, before, agent)
    log_change(work, before, agent, why, state.limited_until)
    if state.limit_wait is not None:
        work.cancel_timer(Timer.LIMIT, state.limit_wait.key)
    # Starts were suspended because of the other agent's crashes, and the queue for its limit.
    passed = None if is_limited(state, agent) else limited_until(state, agent)
    work.set(is_backing_off=False, limit_wait=None, limit_passed=passed, limit_failed=None)
    work.state = switched(work.state, before, agent)
    # A session leases one conversation. Nothing drives the one that it leaves, and without a lease
    # a failed lease of the next one cannot give it back. The start of the process leases that one.
    work.do(HoldConversation(None))


def log_change(
    work: Transition, before: str, agent: str, why: str, limited_until: float | None
) -> None:
    """Log that another agent serves the session."""
    told = {"from": before, "to": agent, "why": why, "limited_until": limited_until}
    work.log(None, kinds.SESSION_FELL_BACK, **told)


def _why(state: Session, before: str, agent: str) -> str:
    names = [each.agent for each in state.config.roster]
    if before not in names:
        return "removed"
    if before in state.missing:
        return "missing"
    if is_limited(state, before):
        return "limited"
    return "available again" if names.index(agent) < names.index(before) else "required"


def noted(state: Session, agent: str, **changes: Any) -> Session:
    """Return the state with changes of an agent that does not serve the session now."""
    agents = dict(state.agents)
    agents[agent] = replace(agents.get(agent, AgentState()), **changes)
    return replace(state, agents=tuple(sorted(agents.items())))


def with_setting(state: Session, name: str, value: str | None, agent: str | None = None) -> Session:
    """Return the state with a changed setting of an agent. `value` None: that of the open.

    `agent` None: the agent that serves the session now. Applied live and by the fold of the log.
    """
    known = state if agent is None else dict(state.agents).get(agent, AgentState())
    kept = tuple(pair for pair in known.settings if pair[0] != name)
    settings = kept if value is None else (*kept, (name, value))
    if agent is not None:
        return noted(state, agent, settings=settings)
    return replace(state, settings=settings)


def switched(state: Session, before: str, agent: str) -> Session:
    """Return the state in which `agent` serves the session, and not `before`.

    Applied by `switch`, and by the fold of the log.
    """
    leaving = state.agent or before
    if agent == leaving:
        return state
    agents = dict(state.agents)
    agents[leaving] = AgentState(
        **{name: getattr(state, name) for name in AgentState.__struct_fields__}
    )
    entering = agents.pop(agent, AgentState())
    return replace(
        state,
        agent=agent,
        agents=tuple(sorted(agents.items())),
        config=config_of(state.config, agent),
        **asdict(entering),
    )


# -- facts ---------------------------------------------------------------------------------------
def watch_limits(work: Transition) -> None:
    """Wait for the end of each limit of an agent of the roster, unless it is awaited already."""
    state = work.state
    if len(state.config.roster) < 2 and state.agent is None:
        return  # The only agent has no other limits to wait for than those of the queue.
    waits = {wait.agent: wait for wait in state.agent_limits}
    for config in state.config.roster:
        until = limited_until(state, config.agent)
        known = waits.get(config.agent)
        if until is not None and (known is None or known.until != until):
            waits[config.agent] = wait = AgentLimit(config.agent, until)
            subject = (Timer.FALLBACK, wait.key)
            work.do(WaitUntil(until, subject, config.agent, resend_seconds(state, until)))
    work.set(agent_limits=tuple(waits.values()))


def resend_seconds(state: Session, until: float) -> float:
    """Return how long a wait for a limit lasts if its end has passed.

    A provider that names a passed time must not get the ask again at once. A limit that is known
    from the log or from another session needs no such delay.
    """
    return RESEND_SECONDS if until == state.limit_met else 0.0


def on_reset(work: Transition, key: str) -> None:
    """Note that a limit has ended. A timer of an earlier limit has another key."""
    waits = work.state.agent_limits
    work.set(
        agent_limits=tuple(
            replace(wait, is_over=True) if wait.key == key else wait for wait in waits
        )
    )


def notice_missing(work: Transition, error: BanksmanError) -> bool:
    """Note that the program of the current agent is missing. Return whether another one may serve.

    The second failed start of a missing agent is for an ask that no other agent can serve.
    """
    state = work.state
    agent = current(state)
    if not isinstance(error, ProgramNotFound) or agent in state.missing:
        return False
    missing = (*state.missing, agent)
    if all(each.agent in missing for each in state.config.roster):
        return False
    work.set(missing=missing)
    return True


def reconfigure(work: Transition, config: Config) -> None:
    """Apply the configuration of a reopen. Missing agents are tried again."""
    state = work.state
    if state.agent is None or any(each.agent == state.agent for each in config.roster):
        work.set(config=config_of(config, state.agent), missing=())
        return
    # The session does not have the serving agent any more. The next grant leaves its process.
    kept = {name: getattr(state.config, name) for name in OF_PROCESS}
    work.set(config=replace(config, **kept), missing=())
    if state.process.phase is ProcessPhase.NONE:
        switch(work, first(work.state).agent)


def states(state: Session) -> list[tuple[str, AgentState | Session]]:
    """Return the state of each agent that has served the session; that of the current one last."""
    return [*state.agents, (current(state), state)]
