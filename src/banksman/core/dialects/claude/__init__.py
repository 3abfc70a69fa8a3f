"""Claude Code: a dialect of JSON lines in both directions.

What it says is read in reader.py, which also tells how its turns open and end; what is written to it is made in
writer.py; how its frames look to a reader is in updates.py. Here is what holds them together, and its
command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from banksman.core.dialects.claude import reader, updates, writer
from banksman.core.dialects.dialect import PLAIN, Prompt, ProtocolState, Setup, StatelessProtocol
from banksman.core.dialects.meaning import Requested
from banksman.core.session.permissions import Decision, Verdict


class Claude:
    """The dialect. It has no state: one instance, `CLAUDE`, serves every session."""

    __slots__ = ()

    name: str = "claude"
    acknowledges_interrupts: bool = True
    can_steer: bool = True
    takes_input: bool = True

    def __repr__(self) -> str:
        return "<Claude dialect>"

    # No method of ours between a token and its meaning: this is the path of each.
    read = staticmethod(reader.read)
    read_head = staticmethod(reader.read_head)

    def begin(self, setup: Setup) -> ProtocolState:
        """Each of its frames says all there is to know."""
        return StatelessProtocol(self, setup)

    def handshake(self, request: str, setup: Setup = PLAIN) -> bytes:
        """Its answer means that the process is ready. Only the first one of a process sets a schema."""
        return writer.initialize(request, setup)

    def prompt(self, ref: str, prompt: Prompt) -> bytes:
        """`ref` must be a uuid: the agent reports on no other."""
        return writer.user(ref, prompt)

    def interrupt(self, request: str) -> bytes:
        return writer.control_request(request, {"subtype": "interrupt"})

    def setting(self, request: str, name: str, value: str) -> bytes:
        return writer.setting(request, name, value)

    def answer(self, asked: Requested, decision: Decision) -> bytes:
        return writer.answer(asked, decision)

    def rule(self, asked: Requested, verdict: Verdict | None) -> bytes:
        return writer.ruling(asked, verdict)

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> bytes:
        return writer.respond(asked, response)

    def refuse(self, request: str, error: str) -> bytes:
        return writer.control_error(request, error)

    def project(self, line: bytes) -> list[dict[str, Any]]:
        """A frame as ACP session updates; the rules are in updates.py. Never raises."""
        return updates.project(line)

    def partial(self, line: bytes) -> list[dict[str, Any]]:
        """What a delta says, if the frame is one. Never raises."""
        return updates.partial(line)

    def projector(self) -> updates.ClaudeProjector:
        """The same for the frames of a turn in order, text as it comes."""
        return updates.ClaudeProjector()

    def transcript(self) -> updates.ClaudeTranscript:
        """What the agent says in the frames of a turn, the unfinished sentence included."""
        return updates.ClaudeTranscript()

    def has_forgotten(self, stderr: str) -> bool:
        """Whether a process that was to resume a conversation ended because there is none of that name."""
        return "No conversation found" in stderr

    def mcp_file(self, servers: Sequence[Mapping[str, Any]]) -> str | None:
        """What `--mcp-config` reads."""
        return writer.mcp_config(servers)

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
        """The command with what the dialect needs and what was wished for, then `args`.

        A value is always part of its flag's word, so that one that begins with a dash cannot become a flag.
        `--include-partial-messages`: without it a long answer is a long silence, no different from a hang, and a
        process that is killed leaves nothing of what it was saying.
        """
        wishes = {
            "resume": resume,
            "mcp-config": mcp_config,
            "model": model,
            "permission-mode": permission_mode,
            "append-system-prompt": system_prompt,
        }
        return [
            *command,
            *("--print", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"),
            *("--include-partial-messages", "--permission-prompt-tool", "stdio"),
            *(writer.flag(name, value) for name, value in wishes.items() if value is not None),
            *(("--fork-session",) if forks else ()),
            *args,
        ]


CLAUDE = Claude()
