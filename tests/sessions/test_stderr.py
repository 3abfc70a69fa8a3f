"""The stderr of a living agent: bounded, without secrets, and of the present process only."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.sessions.helpers import opened

from banksman import Host, Session
from banksman.errors import NotOwner
from banksman.sessions.agent_process import STDERR_BYTES_MAX
from banksman.testing import fake_agent


async def written(session: Session, part: str) -> str:
    """Wait until the agent's stderr has this part, and return it. Stdout and stderr have no common order."""
    while part not in session.stderr():  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    return session.stderr()


async def test_stderr_of_a_living_agent_can_be_read(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert case.session.stderr() == ""
        turn = await case.reaches("@@stderr one\n@@stderr two\n@@hang")
        assert await written(case.session, "two\n") == "one\ntwo\n"
        await turn.interrupt()
        await case.outcome(turn)
        assert case.session.stderr() == "one\ntwo\n"
        await case.answer("@@stderr three\n@@exit 3")
        assert case.session.stderr() == "", "there is no process"
        await case.answer("four")
        assert case.session.stderr() == "", "the next process has its own"
    assert case.session.stderr() == ""


async def test_stderr_keeps_both_ends_of_a_flood(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        await case.answer(f"@@stderr begin\n@@stderr_flood {5 * STDERR_BYTES_MAX}\n@@stderr end")
        text = await written(case.session, "\nend\n")
        assert text.startswith("begin\n")
        assert "\n[…]\n" in text
        assert STDERR_BYTES_MAX / 2 < len(text) <= STDERR_BYTES_MAX + len("\n[…]\n")


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("Password: ", "Password: "),
        ("key the-secr", "key "),
        ("key the-secret-w", "key "),
        ("key the-secret-word", "key [redacted]"),
        ("key umlauts-\\303", "key "),
        ("key line-one\\nline-", "key "),
    ],
)
async def test_stderr_has_an_unfinished_line_and_no_part_of_a_secret(end: str, shown: str) -> None:
    script = f"printf 'key the-secret-word\\n{end}' >&2; exec \"$@\""
    async with Host(secrets=["the-secret-word", "umlauts-äöü", "line-one\nline-two"]) as host:
        session = await host.open("claude", command=["sh", "-c", script, "agent", *fake_agent.command()])
        await (await session.ask("one")).outcome()
        assert await written(session, f"[redacted]\n{shown}") == f"key [redacted]\n{shown}"


@pytest.mark.parametrize("end", ["Password: ", "key the-secr"])
async def test_stderr_of_a_flood_ends_with_an_unfinished_line(end: str) -> None:
    flood = f"head -c {2 * STDERR_BYTES_MAX} /dev/zero | tr '\\0' x"
    script = f"({flood}; printf '\\n{end}') >&2; exec \"$@\""
    async with Host(secrets=["the-secret-word"]) as host:
        session = await host.open("claude", command=["sh", "-c", script, "agent", *fake_agent.command()])
        await (await session.ask("one")).outcome()
        shown = end.removesuffix("the-secr")
        assert (await written(session, f"\n{shown}")).endswith(f"x\n{shown}")


async def test_stderr_of_another_hosts_session_is_refused(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'log.db'}"
    async with Host(store) as first, Host(store) as second:
        session = await first.open("claude", command=fake_agent.command(), name="s")
        await (await session.ask("one")).outcome()
        with pytest.raises(NotOwner, match="cannot read the stderr"):
            second.session("s").stderr()
