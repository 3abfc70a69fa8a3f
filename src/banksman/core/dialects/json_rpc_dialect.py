"""What dialects have in common whose agent is told everything in words: its command line has nothing to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import Notice


class InWords:
    __slots__ = ()

    def has_forgotten(self, stderr: str) -> bool:
        """It says so in words, and stays: see `Forgot`."""
        return False

    def mcp_file(self, servers: Sequence[Mapping[str, Any]]) -> str | None:
        """None: it is told its servers when its conversation begins."""
        return None

    def argv(
        self,
        command: Sequence[str],
        *,
        resume: str | None = None,
        forks: bool = False,
        mcp_config: str | None = None,
        model: str | None = None,
        permission_mode: str | None = None,
        system_prompt: str | None = None,
        args: Sequence[str] = (),
    ) -> list[str]:
        """The command, then `args`. All that was wished for is said over the wire."""
        return [*command, *args]


# Lines that are about another conversation than ours: a subagent has one of its own, and so has what was begun and
# left. They are kept, and are no turn's: neither its answer nor its progress to look at.


def is_aside(line: bytes, conversation: str | None, member: str) -> bool:
    """Whether all that a line tells is about another. `member`: of the parameters, the one that says about which.

    This is the path of each token. A line that has our name in it is ours, which is one look at its first bytes; only
    one that has not is taken apart.
    """
    # It was read from a line, or written to one, so it has bytes. To find is cheaper than to ask whether it is in.
    if conversation is None or line.find(conversation.encode()) >= 0:
        return False
    return all(_is_about_another(message, conversation, member) for message in jsonrpc.decode(line))


def _is_about_another(message: jsonrpc.Message, conversation: str, member: str) -> bool:
    if not isinstance(message, Notice):
        return False
    name = message.named.get(member)
    return isinstance(name, str) and name != conversation
