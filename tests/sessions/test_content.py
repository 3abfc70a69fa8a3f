"""Content blocks in a prompt: images, files and links, refused if the agent does not support them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import Case, opened, sent

from banksman import Hook, Kind, Tool, UsageError
from banksman.sessions import known_agents

IMAGE = {"type": "image", "mimeType": "image/png", "data": "iVBORw0KGgo="}
SENT_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
TEXT = {"type": "text", "text": "what is this?"}


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Replace the profile by one without these capabilities."""
    known = known_agents.load("claude")
    less = dataclasses.replace(known, capabilities=known.capabilities - set(names))

    def load(name: str, **_: bool) -> known_agents.Profile:
        return less

    monkeypatch.setattr(known_agents, "load", load)


def contents(case: Case) -> list[Any]:
    return [frame["message"]["content"] for frame in sent(case) if frame["type"] == "user"]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (IMAGE, SENT_IMAGE),
        (
            {"type": "resource_link", "uri": "file:///a/b.py", "name": "b.py", "size": 3},
            {"type": "text", "text": "[@b.py](file:///a/b.py)"},
        ),
        ({"type": "resource_link", "uri": "file:///a"}, {"type": "text", "text": "[@file](file:///a)"}),
        (
            {"type": "resource", "resource": {"uri": "file:///a", "text": "inside\nof it", "mimeType": "text/plain"}},
            {"type": "text", "text": '<context ref="file:///a">\ninside\nof it\n</context>'},
        ),
    ],
)
async def test_content_block_is_sent_in_agent_format(
    tmp_path: Path, block: dict[str, Any], expected: dict[str, Any]
) -> None:
    async with opened(tmp_path) as case:
        turn = await case.session.ask([TEXT, block])
        assert (await case.outcome(turn)).kind is Kind.DONE
        assert contents(case) == [[TEXT, expected]]


async def test_image_is_sent_by_enqueue_steer_and_collect(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        running = await case.running("one")
        steered = await case.session.ask([TEXT, IMAGE], on_busy="steer")
        await running.interrupt()
        await case.outcome(running)
        await case.outcome(steered)
        queued = await case.session.ask([IMAGE, TEXT], on_busy="collect")
        assert (await case.outcome(queued)).kind is Kind.DONE
        assert contents(case)[1:] == [[TEXT, SENT_IMAGE], [SENT_IMAGE, TEXT]]


@pytest.mark.thorough
async def test_image_of_megabytes_is_sent_whole(tmp_path: Path) -> None:
    data = "A" * (6 << 20)
    async with opened(tmp_path) as case:
        turn = await case.session.ask([TEXT, {**IMAGE, "data": data}])
        assert (await case.outcome(turn)).text == "what is this?"
        assert contents(case)[0][1]["source"]["data"] == data


async def test_image_is_refused_when_agent_lacks_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "images")
    async with opened(tmp_path) as case:
        for how in ("enqueue", "steer", "collect"):
            with pytest.raises(UsageError, match="images"):
                await case.session.ask([TEXT, IMAGE], on_busy=how)
        assert await case.kinds() == ["session.opened"]
        turn = await case.session.ask([TEXT])
        assert (await case.outcome(turn)).kind is Kind.DONE


def _quiet(said: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("hooks", {"hooks": {"Stop": Hook(_quiet)}}),
        ("tools", {"tools": [Tool("it", "does it", {"type": "object"}, _quiet)]}),
        ("mcp_servers", {"mcp_servers": [{"name": "other", "command": "other"}]}),
    ],
)
async def test_open_refuses_option_that_agent_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: dict[str, Any]
) -> None:
    without(monkeypatch, name)
    with pytest.raises(UsageError, match=name):
        async with opened(tmp_path, **how):
            raise AssertionError("it was opened")


async def test_session_call_refuses_option_that_agent_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "schema", "model", "permission_mode")
    async with opened(tmp_path) as case:
        with pytest.raises(UsageError, match="schema"):
            await case.ask("one", schema={"type": "object"})
        with pytest.raises(UsageError, match="model"):
            await case.session.set_model("other")
        with pytest.raises(UsageError, match="permission_mode"):
            await case.session.set_permission_mode("plan")
        assert await case.kinds() == ["session.opened"]


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        "",
        None,
        TEXT,
        b"text",
        ["text"],
        [{}],
        [{"type": "audio", "data": "x", "mimeType": "audio/wav"}],
        [{"type": "text"}],
        [{"type": "text", "text": 3}],
        [{"type": "image", "data": "x"}],
        [{"type": "image", "mimeType": "image/png", "data": b"x"}],
        [{"type": "resource_link", "name": "b.py"}],
        [{"type": "resource", "uri": "file:///a"}],
        # Binary data could only be an image, but the block does not declare one.
        [{"type": "resource", "resource": {"uri": "file:///a", "blob": "x"}}],
        [{"type": "text", "text": "\ud800"}],
    ],
)
async def test_invalid_content_is_refused_before_agent_starts(tmp_path: Path, prompt: Any) -> None:
    async with opened(tmp_path) as case:
        with pytest.raises(UsageError):
            await case.session.ask(prompt)
        assert await case.kinds() == ["session.opened"]
        assert case.processes == []
