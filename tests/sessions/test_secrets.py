"""`Host(secrets=…)`: a secret is never written to the store, whatever way it comes in."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.crash_host import Agents
from tests.sessions.helpers import QUICK, exists
from tests.sessions.takeover_scene import read, recalled

from banksman import Host, Kind, Outcome, Question, Session, UsageError
from banksman.core.dialects.claude.reader import DESCRIPTION_CHARACTERS_MAX
from banksman.core.dialects.failure_texts import RAW_CHARACTERS_MAX
from banksman.core.session.event import TURN_ENDED, UPDATE
from banksman.core.session.process_life import STDERR_CHARACTERS_MAX
from banksman.core.wire.elided_text import CUT
from banksman.sessions.agent_process import STDERR_BYTES_MAX
from banksman.testing import fake_agent

NAME = "the one"
SECRETS = ["hunter2-is-my-key", 'with "quotes" and \\ in it', "geheim\u00fcber\u00e4lles"]


@pytest.fixture
def agents(tmp_path: Path, marker: str) -> Agents:
    return Agents(tmp_path, marker)


def store_of(agents: Agents) -> str:
    return f"sqlite:{agents.folder / 'store.db'}"


async def open_on(host: Host, agents: Agents, **how: Any) -> Session:
    return await host.open("claude", name=NAME, command=agents.command(), options=QUICK, **how)


async def outcome_of(session: Session, prompt: str) -> Outcome:
    return await (await session.ask(prompt)).outcome()


def _held(folder: Path, secrets: Sequence[str] = SECRETS) -> list[str]:
    """Return the files of a store that contain a secret, in UTF-8 or as JSON encodes it."""
    spellings = [
        spelling
        for secret in secrets
        for spelling in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
    ]
    files = sorted(folder.glob("store.db*"))
    assert len(files) >= 2
    return [file.name for file in files if any(spelling.encode() in file.read_bytes() for spelling in spellings)]


async def test_secrets_are_absent_from_store_files(agents: Agents, tmp_path: Path) -> None:
    """The secrets come in by prompts, output, questions, tool results, the command line and the environment."""
    asked: list[Question] = []

    def allow(question: Question) -> str:
        asked.append(question)
        return "allow"

    async with Host(store_of(agents), secrets=SECRETS) as host:
        session = await open_on(
            host,
            agents,
            args=[f"--key={SECRETS[0]}"],
            env={"TOKEN": SECRETS[0], "OTHER": SECRETS[2]},
            system_prompt=f"never say {SECRETS[1]}",
            on_question=allow,
        )
        for secret in SECRETS:
            quoted = json.dumps({"command": f"login {secret}"})
            prompt = (
                f"my key is {secret}\n@@think {secret}\n@@say it is {secret}\n@@stderr {secret}\n@@ask Bash {quoted}"
            )
            turn = await session.ask(prompt)
            outcome = await turn.outcome()
            # The caller gets the real text. Only the store does not keep it.
            assert outcome.text == f"it is {secret}"
            assert asked[-1].input == {"command": f"login {secret}"}
            failed = await outcome_of(session, f"@@failure cannot log in with {secret}")
            assert failed.kind is Kind.FAILED
        hanging = await session.ask(f"{SECRETS[0]}\n@@say {SECRETS[1]}\n@@touch {tmp_path / 'reached'}\n@@hang")
        await exists(tmp_path / "reached")
        receipt = await hanging.interrupt()
        assert receipt.stopped
        assert _held(tmp_path) == []
        given = b"".join(process.stdin for process in agents.evidence.processes)
        assert SECRETS[0].encode() in given, "the agent is to hear it all the same"
        events = await read(session)
        assert sum(event.data.count(b"[redacted]") for event in events) >= 20
        await session.close()
    assert _held_after(tmp_path) == []


async def test_secret_streamed_in_deltas_is_not_stored_in_pieces(agents: Agents) -> None:
    """The agent streams the secret word by word, each in a separate frame and event, and then sends it whole."""
    secret = "correct horse battery"
    async with Host(store_of(agents), secrets=[secret]) as host:
        session = await open_on(host, agents)
        outcome = await outcome_of(session, f"@@speak 0 it is {secret} staple")
        assert outcome.text == f"it is {secret} staple", "the caller gets what was said"
        said = ""
        for event in await read(session):
            frame: dict[str, Any] = json.loads(event.data) if event.kind == UPDATE else {}
            if frame.get("type") == "stream_event" and frame["event"]["type"] == "content_block_delta":
                said += frame["event"]["delta"]["text"]
        assert said == "it is [redacted] staple"


# Each group of four characters occurs once.
LONG = "".join(f"{number:04x}" for number in random.Random(4).sample(range(0x1000, 0x10000), 500))
STDERRS = {
    "in the middle of what is told": SECRETS[0] + "y" * (STDERR_CHARACTERS_MAX - 12),
    # 64 KiB are kept, half of them at either end, and a secret lies on both sides of the omitted part. The replacements
    # make the rest so short that all of it is reported.
    "where what is kept of it ends": "y" * (STDERR_BYTES_MAX // 2 - 1000) + LONG * 40 + "y" * 1700,
}


@pytest.mark.parametrize("cut", STDERRS)
async def test_secret_cut_in_stderr_is_not_stored_in_part(agents: Agents, cut: str) -> None:
    secrets = [SECRETS[0], LONG]
    async with Host(store_of(agents), secrets=secrets) as host:
        session = await open_on(host, agents)
        outcome = await outcome_of(session, f"@@stderr {STDERRS[cut]}\n@@exit 3")
        assert outcome.kind is Kind.FAILED
        assert "yyyy" in str(outcome.error)
        [ended] = [event.data.decode() for event in await read(session) if event.kind == TURN_ENDED]
        parts = [secret[place : place + 8] for secret in secrets for place in range(len(secret) - 7)]
        assert "yyyy" in ended
        assert [part for part in parts if part in ended] == []


def _raw(**frame: Any) -> str:
    return f"raw {json.dumps(frame)}"


def _limits_cut(told: str) -> list[str]:
    """Return script lines that send the text in every member that Banksman cuts."""
    task = {"task_id": "one", "task_type": "shell", "description": told}
    return [
        _raw(type="system", subtype="api_retry", attempt=1, error=told, retry_delay_ms=1),
        _raw(type="system", subtype="background_tasks_changed", tasks=[task]),
        _raw(type="system", subtype="background_tasks_changed", tasks=[]),
        f"boundary {json.dumps({'is_error': True, 'api_error_type': told, 'result': 'it failed'})}",
    ]


@pytest.mark.parametrize("limit", [DESCRIPTION_CHARACTERS_MAX, RAW_CHARACTERS_MAX])
async def test_secret_in_cut_member_is_not_stored_in_part(agents: Agents, limit: int) -> None:
    """The agent has the secret in its script, so that no prompt contains it."""
    secret = "hunter2-is-my-key"
    # The cut falls behind 4, 8, … characters of the secret.
    prompts = {
        f"prompt {kept}": _limits_cut("y" * (limit - len(CUT) - kept) + secret + "z" * 20) for kept in (4, 8, 12)
    }
    async with Host(store_of(agents), secrets=[secret]) as host:
        session = await host.open("claude", name=NAME, command=fake_agent.command(prompts), options=QUICK)
        for prompt in prompts:
            assert (await outcome_of(session, prompt.removeprefix("prompt "))).kind is Kind.FAILED
        events = [event for event in await read(session) if not event.is_frame]
    stored = "".join(event.data.decode() for event in events)
    assert stored.count(CUT) >= 3
    assert "hunt" not in stored


def _held_after(folder: Path) -> list[str]:
    """Return the files that contain a secret, after everything was checkpointed into the single file of the store."""
    return [
        file.name
        for file in folder.glob("store.db*")
        if any(secret.encode() in file.read_bytes() for secret in SECRETS)
    ]


async def test_names_and_keys_refuse_secrets(agents: Agents, tmp_path: Path) -> None:
    """Names and keys cannot be redacted, because they would be different ones."""
    async with Host(store_of(agents), secrets=SECRETS) as host:
        session = await open_on(host, agents)
        for secret in SECRETS:
            with pytest.raises(UsageError):
                await session.ask("one", key=f"key {secret}")
            with pytest.raises(UsageError):
                await session.rename(f"name {secret}")
            with pytest.raises(UsageError):
                await host.open("claude", name=secret, command=agents.command())
        assert [each.name for each in host.sessions()] == [NAME]
        assert _held(tmp_path) == []


async def test_unredacted_text_is_found_in_store_files(agents: Agents, tmp_path: Path) -> None:
    """The control: the search in the files finds text that is there."""
    async with Host(store_of(agents)) as host:
        session = await open_on(host, agents)
        for secret in SECRETS:
            await outcome_of(session, f"my key is {secret}")
            assert "store.db-wal" in _held(tmp_path, [secret])
        await session.close()
    assert _held_after(tmp_path) == ["store.db"]


async def test_secrets_are_absent_from_snapshots_and_queue(tmp_path: Path, agents: Agents) -> None:
    async with Host(store_of(agents), secrets=SECRETS) as host:
        session = await open_on(host, agents)
        turn = await session.ask(f"{SECRETS[0]}\n@@flood 1500 10\n@@say {SECRETS[0]}")
        await session.ask(f"waits {SECRETS[0]}")
        assert (await turn.outcome()).kind is Kind.DONE
        store: Any = host._own_sessions().store  # pyright: ignore[reportPrivateUsage]
        snapshot = await store.snapshot(session.id)
        assert snapshot is not None
        assert SECRETS[0].encode() not in snapshot.data
        assert _held(tmp_path) == []


async def test_session_with_secret_in_command_line_is_not_restarted_without_it(agents: Agents) -> None:
    """A redacted command line must not run again: an agent with `[redacted]` for a key would do something else."""
    async with Host(store_of(agents), secrets=SECRETS) as host:
        session = await open_on(host, agents, args=[f"--key={SECRETS[0]}"])
        assert (await outcome_of(session, "one")).text == "one"
    async with Host(store_of(agents), secrets=SECRETS) as host:
        with pytest.raises(UsageError, match="secret"):
            await host.session(NAME).ask("two")
        assert len(agents.evidence.processes) == 1
        session = await open_on(host, agents, args=[f"--key={SECRETS[0]}"])
        assert await recalled(session) == ["one"]
        assert all(f"--key={SECRETS[0]}" in process.argv for process in agents.evidence.processes)
