"""What one program does otherwise than its protocol says: measured, kept in its profile, and put right by its dialect.

Nothing here is guessed at run time. An agent that says `end_turn` for a turn that was cancelled, or for one that
failed, says it in every such turn; so a profile states it once, with the evidence beside it, and the outcome that
callers get is the true one. What the agent said is in the log as it came, whatever became of it.
"""

from __future__ import annotations

from msgspec import Struct

from banksman.core.json_schema.regex import NoPattern, TooMuch, compiled

SERVICES = ("fs", "terminal")
# A message of an error is short. A longer text is an answer, whatever it begins with, and is not looked at.
ERROR_CHARACTERS_MAX = 4000


class Quirks(Struct, frozen=True):
    """`cancel_may_say`: the reasons to stop that mean "cancelled" after we have cancelled. `error_texts`: patterns; a
    turn that ends well and whose last text one of them matches has failed. `silence_is_error`: so has one that ends
    well and said and did nothing at all. `serves`: what of ours is offered to the agent. `recites_late`: it may go on
    repeating a conversation that it has loaded after it has answered."""

    cancel_may_say: tuple[str, ...] = ()
    error_texts: tuple[str, ...] = ()
    silence_is_error: bool = False
    serves: tuple[str, ...] = SERVICES
    recites_late: bool = False

    def has_failed(self, text: str) -> bool:
        """Whether the last text of a turn that is said to have ended well is the message of an error."""
        if not self.error_texts or len(text) > ERROR_CHARACTERS_MAX:
            return False
        return any(_matches(pattern, text) for pattern in self.error_texts)


def fault(pattern: str) -> str | None:
    """What is wrong with a pattern for texts of errors; None: nothing. Agents write the texts, so a pattern must be
    one that is followed in a bounded time, whatever it meets."""
    try:
        compiled(pattern)
    except NoPattern as exc:
        return str(exc)
    return None


def _matches(pattern: str, text: str) -> bool:
    try:
        return compiled(pattern).search(text)
    except TooMuch:
        # What cannot be judged is no proof of an error.
        return False
