"""Claude Code dialect: JSON lines in both directions.

- reader.py: the meaning of each line, and the rules for the start and end of a turn.
- writer.py: the frames to the agent.
- client_requests.py: the agent's requests, and the answers to them.
- updates.py: the frames as session updates.

This module ties them together and builds the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from banksman.core.dialects.claude import client_requests, reader, updates, writer
from banksman.core.dialects.dialect import (
    PLAIN,
    Decision,
    Prompt,
    ProtocolState,
    Setup,
    StatelessProtocol,
    Verdict,
)
from banksman.core.dialects.meaning import Requested


class Claude:
    """The Claude dialect. Stateless: one instance, `CLAUDE`, serves every session."""

    __slots__ = ()

    name: str = "claude"
    acknowledges_interrupts: bool = True
    can_steer: bool = True
    takes_input: bool = True

    def __repr__(self) -> str:
        return "<Claude dialect>"

    # Bound directly, without a wrapper method: every token takes this path.
    read = staticmethod(reader.read)
    read_head = staticmethod(reader.read_head)
    project = staticmethod(updates.project)
    partial = staticmethod(updates.partial)
    may_show_output = staticmethod(updates.may_show_output)

    def begin(self, setup: Setup) -> ProtocolState:
        """Return a stateless protocol, because each Claude frame is self-contained."""
        return StatelessProtocol(self, setup)

    def handshake(self, request: str, setup: Setup = PLAIN) -> bytes:
        """Write the handshake. Its answer means that the process is ready.

        Only the first handshake of a process sets a schema.
        """
        return writer.initialize(request, setup)

    def prompt(self, ref: str, prompt: Prompt) -> bytes:
        """Write a prompt. `ref` must be a UUID: the agent does not report on other names."""
        return writer.user(ref, prompt)

    def interrupt(self, request: str) -> bytes:
        return writer.control_request(request, {"subtype": "interrupt"})

    def setting(self, request: str, name: str, value: str) -> bytes:
        return writer.setting(request, name, value)

    def answer(self, asked: Requested, decision: Decision) -> bytes:
        return client_requests.answer(asked, decision)

    def rule(self, asked: Requested, verdict: Verdict | None) -> bytes:
        return client_requests.ruling(asked, verdict)

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> bytes:
        return client_requests.respond(asked, response)

    def refuse(self, request: str, error: str) -> bytes:
        return writer.control_error(request, error)

    def projector(self) -> updates.ClaudeProjector:
        """Return a projector for the frames of a turn in order. It emits text as it arrives."""
        return updates.ClaudeProjector()

    def transcript(self) -> updates.ClaudeTranscript:
        """Return a collector of the agent's text in a turn, including an unfinished message."""
        return updates.ClaudeTranscript()

    def has_forgotten(self, stderr: str) -> bool:
        """Return whether a resuming process ended because the conversation does not exist."""
        return "No conversation found" in stderr

    def mcp_file(self, servers: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the content of the file for `--mcp-config`."""
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
        """Build the command line: the command, the dialect's flags, the settings, then `args`.

        Each value is in the same word as its flag, so that a value with a leading dash cannot
        become a flag. `--include-partial-messages` is needed for two reasons. Without it a long
        answer is a long silence that looks like a hang, and a killed process leaves nothing of its
        unfinished text.
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
            *(
                "--print",
                "--input-format",
                "stream-json",
                "--output-format",
                "stream-json",
                "--verbose",
            ),
            *("--include-partial-messages", "--permission-prompt-tool", "stdio"),
            *(writer.flag(name, value) for name, value in wishes.items() if value is not None),
            *(("--fork-session",) if forks else ()),
            *args,
        ]


CLAUDE = Claude()
