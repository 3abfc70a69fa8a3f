"""The agent's conversation: its name, its cost, and its end when it is too long for the model.

`process_life.py` handles a conversation that the agent has lost, or that another session drives.
"""

from __future__ import annotations

from msgspec.structs import replace

from banksman.core.dialects.meaning import TurnOver
from banksman.core.session import event as kinds
from banksman.core.session import turn_usage
from banksman.core.session.effects import HoldConversation
from banksman.core.session.state import Replacement
from banksman.core.session.transition import Transition

# A prompt of this size alone may overflow the model; see `notice_overflow`.
LARGE_PROMPT_CHARACTERS = 256 << 10
# After this many overflows in a row the conversation is too long, not the prompt.
OVERFLOWS_MAX = 2


def learn(work: Transition, conversation: str) -> None:
    """Record a name that the agent gives, and request its lease.

    Not from a process whose conversation was given up: it still uses the old name.
    """
    if work.state.conversation != conversation and not work.state.process.has_overflowed:
        work.set(conversation=conversation)
        work.do(HoldConversation(conversation))
        work.log(None, kinds.SESSION_CONVERSATION, conversation=conversation)


def learn_before_prompt(work: Transition) -> None:
    """Record the conversation's name, just before the agent gets a prompt that must not be lost.

    Before that, the conversation holds nothing to resume. Some agents also cannot find a
    conversation without any prompt.
    """
    protocol = work.state.process.protocol
    if protocol is not None and protocol.conversation is not None:
        learn(work, protocol.conversation)


def with_cost(work: Transition, over: TurnOver) -> TurnOver:
    """Add the cost of this turn to its boundary, and to the total of the session.

    The agent reports the total of all turns, including the turns before a resume. So the cost of
    the turn is the difference.
    """
    spent, before = over.spent, work.state.spent
    if spent is not None:
        work.set(spent=spent)
    if over.cost is None and spent is not None and before is not None:
        over = replace(over, cost=turn_usage.cost_of(work.state.speaking, spent, before))
    # Otherwise the agent reports the cost of the turn itself. Or the conversation began elsewhere,
    # and its earlier total is unknown.
    if over.cost is not None:
        work.set(cost=(work.state.cost or 0.0) + over.cost)
    return over


def notice_overflow(work: Transition, over: TurnOver) -> None:
    """Give up a conversation that has grown too long for the model.

    A conversation that is too long fails every time. A single large prompt may be the cause
    instead; that prompt is not sent again. If a small prompt overflows, or the next prompt too, the
    conversation itself is too long.
    """
    if work.state.process.has_overflowed:
        return
    if not over.is_overflow:
        if not over.is_error:
            work.set(overflows=0)
        return
    overflows = work.state.overflows + 1
    work.set(overflows=overflows)
    turn = work.state.turn
    prompt = () if turn is None or turn.ask is None else turn.prompt
    size = len(prompt) if isinstance(prompt, str) else sum(len(str(block)) for block in prompt)
    if overflows < OVERFLOWS_MAX and size >= LARGE_PROMPT_CHARACTERS:
        return
    work.log(
        None,
        kinds.SESSION_CONTEXT_LOST,
        conversation=work.state.conversation,
        error=over.error or "the conversation is too long for the model",
    )
    work.set(conversation=None, fork_of=None, spent=0.0, overflows=0)
    work.set_process(stale=Replacement.NOW, has_overflowed=True)
    work.do(HoldConversation(None))
