"""Sessions that fall back: a fake Claude first, then a fake Codex, in one log."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sessions.helpers import QUICK, bodies, let_pass
from tests.sessions.test_provider_errors import LIMITED, rate_limit

from banksman import Event, Host, Kind, Session, UsageError
from banksman.core.session import event as kinds
from banksman.errors import ProgramNotFound
from banksman.sessions import session_timers
from banksman.store import transfer
from banksman.testing import fake_agent, fake_codex
from banksman.testing.fake_agent import Evidence


class Scene:
    """A folder with a fake Claude, and with a profile of a fake Codex under its usual name."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.store = f"sqlite:{folder / 'log.db'}"
        self.claude = fake_agent.command((), evidence=folder / "claude", memory=folder / "claude-memory")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        self.profile("codex", fake_codex.command(evidence=folder / "codex", memory=folder / "codex-memory"))

    def profile(self, name: str, command: list[str], base: str = "codex") -> None:
        agents = self.folder / "config" / "banksman" / "agents"
        agents.mkdir(parents=True, exist_ok=True)
        (agents / f"{name}.toml").write_text(f'extends = "{base}"\ncommand = {json.dumps(command)}\n')

    def prompts(self, agent: str) -> list[str]:
        """The text of each prompt that reached an agent."""
        frames = [frame for process in Evidence(self.folder / agent).processes for frame in process.frames]
        if agent == "codex":
            return [frame["params"]["input"][0]["text"] for frame in frames if frame.get("method") == "turn/start"]
        return [frame["message"]["content"] for frame in frames if frame["type"] == "user"]

    async def open(self, host: Host, **how: Any) -> Session:
        how = {"command": self.claude, "options": QUICK, "cwd": str(self.folder), "name": "s", **how}
        return await host.open("claude", fallback=["codex"], **how)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def limit(seconds: float = 3600, before: str = "") -> str:
    """A prompt that fails by a limit of the account."""
    return f"{before}@@raw {rate_limit(time.time() + seconds)}\n@@boundary {json.dumps(LIMITED)}"


async def answer(session: Session, prompt: str) -> tuple[Kind, str | None]:
    outcome = await (await session.ask(prompt)).outcome()
    return outcome.kind, outcome.text


async def events(session: Session) -> list[Event]:
    return [event async for event in session.events(0, waits=False)]


async def changes(session: Session) -> list[tuple[str, str, str]]:
    found = bodies(await events(session), kinds.SESSION_FELL_BACK)
    return [(body["from"], body["to"], body["why"]) for body in found]


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110  No event reports the end of a limit.
        await asyncio.sleep(0.002)


def is_free(session: Session) -> bool:
    state = session._driver.state  # pyright: ignore[reportPrivateUsage]
    return bool(state.agent_limits) and all(limit.is_over for limit in state.agent_limits)


async def test_limited_session_falls_back_and_shows_it(scene: Scene) -> None:
    async with Host(store=scene.store) as host:
        session = await scene.open(host)
        assert [(each.name, each.is_missing) for each in session.status().fallback] == [
            ("claude", False),
            ("codex", False),
        ]
        kind, _ = await answer(session, limit())
        assert kind is Kind.FAILED
        turn = await session.ask("hello")
        updates = [update["sessionUpdate"] async for update in turn]
        assert (await turn.outcome()).text == "you said: hello"
        assert updates[0] == "agent_message_chunk"
        assert await turn.said() == "you said: hello"
        status = session.status()
        assert (status.agent, session.agent) == ("codex", "claude")
        assert status.limited_until is None
        claude, codex = status.fallback
        assert claude.limited_until is not None
        assert codex.limited_until is None
        assert await changes(session) == [("claude", "codex", "limited")]
        assert scene.prompts("codex") == ["hello"]
        assert len(scene.prompts("claude")) == 1
        # Usage is counted for the agent that served the turn.
        turns = {row.key: row.usage.turns for row in await host.usage("agent")}
        assert turns == {"claude": 1, "codex": 1}
        # Frames of both dialects are projected for readers.
        shown = [event for event in await events(session) if event.kind == kinds.UPDATE and event.body["updates"]]
        assert any(b"you said: hello" in event.data for event in shown)
        await session.close()


async def test_session_returns_to_first_agent_and_its_conversation(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Host(store=scene.store) as host:
        session = await scene.open(host)
        assert await answer(session, "one") == (Kind.DONE, "one")
        first = session.status().conversation
        assert first is not None
        await answer(session, limit(3600))
        assert await answer(session, "two") == (Kind.DONE, "you said: two")
        second = session.status().conversation
        assert second not in (None, first)
        # The limit ends. No test could wait for it, and a shorter one would end too early on a busy machine.
        later = SimpleNamespace(time=lambda: time.time() + 7200)
        monkeypatch.setattr(session_timers, "time", later)
        let_pass(session_timers.WALL_SECONDS_MAX)
        await until(lambda: is_free(session))
        assert await answer(session, "three") == (Kind.DONE, "three")
        assert session.status().conversation == first
        assert await changes(session) == [("claude", "codex", "limited"), ("codex", "claude", "available again")]
        retired = bodies(await events(session), kinds.PROCESS_RETIRED)
        assert [body["reason"] for body in retired] == ["fallback", "fallback"]
        await answer(session, limit(36_000))
        assert await answer(session, "four") == (Kind.DONE, "you said: four")
        assert session.status().conversation == second
        await session.close()


async def test_ask_whose_tool_ran_is_not_sent_to_fallback(scene: Scene) -> None:
    async with Host(store=scene.store) as host:
        session = await scene.open(host)
        kind, _ = await answer(session, limit(before="@@tool_use Bash\n@@tool_result\n"))
        assert kind is Kind.FAILED
        assert await answer(session, "next") == (Kind.DONE, "you said: next")
        assert scene.prompts("codex") == ["next"]
        await session.close()


async def test_ask_that_met_limit_without_effect_is_served_by_fallback(scene: Scene) -> None:
    async with Host(store=scene.store) as host:
        raw, boundary = (line.removeprefix("@@") for line in limit().split("\n"))
        command = fake_agent.command({"prompt 1": [raw, boundary]}, evidence=scene.folder / "claude")
        session = await scene.open(host, on_limit="wait", command=command)
        assert await answer(session, "hello") == (Kind.DONE, "you said: hello")
        assert [len(scene.prompts(agent)) for agent in ("claude", "codex")] == [1, 1]
        assert await changes(session) == [("claude", "codex", "limited")]
        await session.close()


async def test_limit_of_another_session_of_the_account_lets_session_fall_back(scene: Scene) -> None:
    async with Host(store=scene.store) as host:
        first, second = await scene.open(host), await scene.open(host, name="other")
        await answer(first, limit())
        await until(lambda: second.status().limited_until is not None)
        assert await answer(second, "hello") == (Kind.DONE, "you said: hello")
        # The limit is that of the account of Claude, and not of the agent that serves now.
        assert second.status().limited_until is None
        assert scene.prompts("codex") == ["hello"]
        await first.close()
        await second.close()


async def test_missing_first_agent_is_passed_over(scene: Scene) -> None:
    async with Host(store=scene.store) as host:
        session = await scene.open(host, command=[str(scene.folder / "no-such-program")])
        assert await answer(session, "hello") == (Kind.DONE, "you said: hello")
        assert await changes(session) == [("claude", "codex", "missing")]
        assert session.status().fallback[0].is_missing
        # It is tried again after a reopen.
        again = await scene.open(host)
        assert again is session
        assert await answer(session, "here") == (Kind.DONE, "here")
        assert session.status().agent == "claude"
        await session.close()


async def test_open_fails_when_no_agent_is_installed(scene: Scene) -> None:
    missing = [str(scene.folder / "no-such-program")]
    scene.profile("codex", missing)
    async with Host(store=scene.store) as host:
        with pytest.raises(ProgramNotFound):
            await scene.open(host, command=missing)


@pytest.mark.thorough
async def test_restarted_host_continues_with_fallback(scene: Scene) -> None:
    async with Host(store=scene.store) as host:
        session = await scene.open(host)
        await answer(session, "one")
        first = session.status().conversation
        await answer(session, limit(4))
        await answer(session, "two")
        second = session.status().conversation
    async with Host(store=scene.store) as host:
        # The log alone has everything: the fall-backs, the agent that serves, and both conversations.
        session = host.session("s")
        assert (await session.look()).agent == "codex"
        assert await answer(session, "three") == (Kind.DONE, "you said: three")
        assert session.status().conversation == second
        await until(lambda: is_free(session))
        assert await answer(session, "four") == (Kind.DONE, "four")
        assert session.status().conversation == first
        await session.close()


async def test_reopen_without_fallback_goes_back(scene: Scene) -> None:
    async with Host(store=scene.store) as host:
        session = await scene.open(host)
        await answer(session, limit())
        await answer(session, "two")
        assert session.status().agent == "codex"
        await host.open("claude", command=scene.claude, options=QUICK, cwd=str(scene.folder), name="s")
        assert await answer(session, "three") == (Kind.DONE, "three")
        assert (await changes(session))[-1] == ("codex", "claude", "removed")
        assert session.status().fallback == ()
        await session.close()


async def test_setting_is_of_agent_that_serves(scene: Scene) -> None:
    async with Host(store=scene.store) as host:
        session = await scene.open(host)
        await session.set_model("large")
        await answer(session, limit())
        await answer(session, "two")
        assert session._driver.state.settings == ()  # pyright: ignore[reportPrivateUsage]
        await session.set_model("other")
        await answer(session, "three")
        state = session._driver.state  # pyright: ignore[reportPrivateUsage]
        assert state.settings == (("model", "other"),)
        assert dict(state.agents)["claude"].settings == (("model", "large"),)
    async with Host(store=scene.store) as host:
        # The model of an open is that of the first agent.
        session = await scene.open(host, model="huge")
        state = session._driver.state  # pyright: ignore[reportPrivateUsage]
        assert state.settings == (("model", "other"),)
        assert dict(state.agents)["claude"].settings == ()
        await session.close()


async def test_fork_copies_conversation_of_first_agent(scene: Scene) -> None:
    async with Host(store=scene.store) as host:
        session = await scene.open(host)
        await answer(session, "one")
        first = session.status().conversation
        await answer(session, limit())
        await answer(session, "two")
        fork = await host.fork(session, name="copy")
        assert fork.origin == first
        # The account is limited, so the fork falls back, too. Its fall-back begins an own conversation.
        assert await answer(fork, "three") == (Kind.DONE, "you said: three")
        assert fork.origin == first
        assert fork.status().conversation not in (None, session.status().conversation)
        await fork.close()
        await session.close()


@pytest.mark.parametrize(
    ("fallback", "message"),
    [
        ("codex", "fallback cannot be"),
        ([7], "fallback cannot contain 7"),
        (["claude"], "it is the agent of the session"),
        (["codex", "codex"], "names an agent twice"),
        (["nobody"], "there is no agent 'nobody'"),
        ([f"a{number}" for number in range(9)], "too many"),
    ],
)
async def test_wrong_fallback_is_refused(scene: Scene, fallback: Any, message: str) -> None:
    async with Host(store=scene.store) as host:
        with pytest.raises(UsageError, match=message):
            await host.open("claude", command=scene.claude, fallback=fallback)


async def test_fallback_must_support_what_belongs_to_session(scene: Scene) -> None:
    async def guard(**_: Any) -> None: ...

    async with Host(store=scene.store) as host:
        with pytest.raises(UsageError, match="Codex does not support hooks"):
            await scene.open(host, hooks={"PreToolUse": guard})


async def test_imported_session_forks_conversation_of_each_agent(scene: Scene) -> None:
    path = scene.folder / "exported"
    async with Host(store=scene.store) as host:
        session = await scene.open(host)
        await answer(session, "one")
        await answer(session, limit())
        await answer(session, "two")
        second = session.status().conversation
        await transfer.export_to(host.log, "s", path)
        await session.close()
    async with Host(store=f"sqlite:{scene.folder / 'other.db'}") as host:
        await transfer.import_session(host.log, path, session="s-00000000000000aa", name="s")
        session = await scene.open(host)
        # The account may be another one here, so the first agent is tried again.
        assert await answer(session, "three") == (Kind.DONE, "three")
        await answer(session, limit())
        assert await answer(session, "four") == (Kind.DONE, "you said: four")
        assert session.status().conversation not in (None, second)
        await session.close()
