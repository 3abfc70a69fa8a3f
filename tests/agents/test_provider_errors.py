"""Failures of the provider with real agents: each status, retries, account limits and empty answers.

The fake model answers as the provider would. The agents retry only once, so that a test does not wait for minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.agents.agents import RealAgent
from tests.agents.ground import remove

from banksman import AgentError, ErrorKind, Host, Kind, Outcome, Session
from banksman.core.session import event as kinds
from banksman.testing.fake_model import FakeModel

NAMES = ("claude", "codex")
SECONDS_MAX = 100
# One retry instead of ten.
WORDS = {
    "codex": [
        *("-c", "model_providers.fake.request_max_retries=1"),
        *("-c", "model_providers.fake.stream_max_retries=1"),
    ]
}
RETRIES = {"claude": {"CLAUDE_CODE_MAX_RETRIES": "1"}}
# The script, the kind, the status that each agent reports, and whether it retries.
FAILURES: dict[str, tuple[str, ErrorKind, dict[str, int | None], dict[str, bool]]] = {
    "400": ("@@error 400", ErrorKind.INVALID_REQUEST, {"claude": 400}, {}),
    "401": ("@@error 401", ErrorKind.AUTH, {"claude": 401, "codex": 401}, {"claude": True, "codex": True}),
    "402": ("@@error 402", ErrorKind.BILLING, {"claude": 402, "codex": 402}, {"codex": True}),
    "403": ("@@error 403", ErrorKind.AUTH, {"claude": 403, "codex": 403}, {"codex": True}),
    "throttle": (
        "@@throttle 1",
        ErrorKind.RATE_LIMITED,
        {"claude": 429, "codex": 429},
        {"claude": True, "codex": True},
    ),
    "500": ("@@error 500", ErrorKind.OVERLOADED, {"claude": 500}, {"claude": True, "codex": True}),
    "529": ("@@error 529", ErrorKind.OVERLOADED, {"claude": 529, "codex": 529}, {"claude": True, "codex": True}),
    "cut stream": ("@@text half\n@@drop", ErrorKind.NETWORK, {}, {"codex": True}),
    "overflow": ("@@overflow", ErrorKind.CONTEXT_OVERFLOW, {"claude": 400}, {}),
}


class Provider:
    """A real agent with a provider that fails as the prompt says."""

    def __init__(self, agent: RealAgent, model: FakeModel, folder: Path) -> None:
        self.agent = agent
        self.model = model
        self.folder = folder

    def run(self, body: Callable[[Session], Any], *, has_subscription: bool = False, **how: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(SECONDS_MAX), self.opened(has_subscription, **how) as session:
                await body(session)

        asyncio.run(main())

    @asynccontextmanager
    async def opened(self, has_subscription: bool, **how: Any) -> AsyncGenerator[Session]:
        env = {**self.agent.env(self.model, self.folder / "home"), **RETRIES.get(self.agent.name, {})}
        if has_subscription and self.agent.name == "claude":
            # Only the account of a subscription has usage windows. The token is not checked by the fake model.
            env.pop("ANTHROPIC_API_KEY")
            env["CLAUDE_CODE_OAUTH_TOKEN"] = "fake-token"
        work = self.folder / "work"
        work.mkdir()
        async with Host() as host:
            yield await host.open(
                self.agent.name,
                cwd=work,
                env=env,
                inherit_env=False,
                command=[*self.agent.command(self.model), *WORDS.get(self.agent.name, ())],
                on_question=lambda _: "allow",
                **how,
            )


@pytest.fixture(params=NAMES)
def provider(
    request: pytest.FixtureRequest, real_agent: Callable[[str], RealAgent], tmp_path: Path
) -> Generator[Provider]:
    with FakeModel() as model:
        yield Provider(real_agent(request.param), model, tmp_path)
    remove(tmp_path)


async def answer(session: Session, prompt: str) -> Outcome:
    return await (await session.ask(prompt)).outcome()


def failed(outcome: Outcome) -> AgentError:
    assert outcome.kind is Kind.FAILED
    assert isinstance(outcome.error, AgentError)
    return outcome.error


async def logged(session: Session, kind: str) -> list[dict[str, Any]]:
    return [event.body async for event in session.events() if event.kind == kind]


@pytest.mark.parametrize("name", FAILURES)
def test_failure_of_provider_has_its_kind(provider: Provider, name: str) -> None:
    script, kind, statuses, retries = FAILURES[name]

    async def body(session: Session) -> None:
        error = failed(await answer(session, script))
        assert error.kind is kind
        # Codex does not report every status.
        assert error.status == statuses.get(provider.agent.name, error.status)
        assert error.message
        assert error.hint
        told = await logged(session, kinds.PROVIDER_RETRYING)
        if retries.get(provider.agent.name):
            assert {each["error"] for each in told} == {kind}
            assert told[0]["attempt"] == 1
        # The provider works again, and so does the session.
        assert (await answer(session, "@@text fine")).text == "fine"

    provider.run(body)


def test_retry_that_succeeds_is_logged(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(session: Session) -> None:
        # Codex repeats a failed request once without a word, and reports only the next retry.
        outcome = await answer(session, "@@error 529 2\n@@next\n@@text recovered")
        assert (outcome.kind, outcome.text) == (Kind.DONE, "recovered")
        assert await logged(session, kinds.PROVIDER_RETRYING)
        assert session.status().retry is None

    monkeypatch.setitem(RETRIES, "claude", {"CLAUDE_CODE_MAX_RETRIES": "3"})
    provider.run(body)


def test_account_limit_has_its_reset_time(provider: Provider) -> None:
    async def body(session: Session) -> None:
        before = time.time()
        error = failed(await answer(session, "@@limit 600"))
        assert error.kind is ErrorKind.USAGE_LIMIT
        assert error.limited_until is not None
        assert before + 600 <= error.limited_until <= time.time() + 602
        (change,) = await logged(session, kinds.LIMITS_CHANGED)
        assert change["limited_until"] == session.status().limited_until == error.limited_until
        (window,) = session.status().limits
        assert (window.used, window.is_exhausted) == (1.0, True)
        assert (await answer(session, "@@text fine")).text == "fine"
        assert session.status().limited_until is None

    provider.run(body, has_subscription=True)


def test_asks_wait_for_the_reset_of_the_account(provider: Provider) -> None:
    def calls() -> int:
        return sum(request.api is not None for request in provider.model.requests)

    async def body(session: Session) -> None:
        first = await session.ask("@@limit 5 1\n@@next\n@@text first")
        requeued = (event async for event in session.follow() if event.kind == kinds.TURN_REQUEUED)
        until = (await anext(requeued)).body["limited_until"]
        await requeued.aclose()
        before = calls()
        assert before >= 1
        second = await session.ask("@@text second")
        await asyncio.sleep(until - time.time())
        # The model counts no call between the limit and its end.
        assert calls() == before
        assert [(await turn.outcome()).text for turn in (first, second)] == ["first", "second"]
        assert calls() >= before + 2
        begun = [event.at async for event in session.events() if event.kind == kinds.TURN_STARTED]
        assert len(begun) == 3
        assert begun[0] < until <= begun[1]

    provider.run(body, has_subscription=True, on_limit="wait")


def test_use_of_account_window_is_reported(provider: Provider) -> None:
    async def body(session: Session) -> None:
        assert (await answer(session, "@@used 42 600\n@@text fine")).text == "fine"
        (window,) = session.status().limits
        assert (window.used, window.is_exhausted) == (0.42, False)
        assert session.status().limited_until is None

    provider.run(body, has_subscription=True)


def test_success_without_answer_after_tool_is_empty(provider: Provider) -> None:
    async def body(session: Session) -> None:
        outcome = await answer(session, f"{provider.agent.run('echo hi')}\n@@next\n@@text  ")
        assert (outcome.kind, outcome.empty) == (Kind.DONE, True)
        outcome = await answer(session, f"{provider.agent.run('echo hi')}\n@@next\n@@text done")
        assert (outcome.text, outcome.empty) == ("done", False)

    provider.run(body)
