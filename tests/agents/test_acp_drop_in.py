"""Real ACP agents behind the client of the protocol's Python SDK, with the SDK's processes and with Banksman's.

The client program is killed while a tool of the agent runs in the background, with a child that ignores TERM. With
`banksman.acp` no process of the agent is left after the grace period. With `acp` alone some are: that is the control.
The conversation is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from tests.acp_client import Order, Reply, client, replies
from tests.agents.agents import RealAgent
from tests.agents.ground import wait
from tests.agents.matrix.place import Place, Places, making_places

# Claude Code and the app-server of Codex do not speak ACP.
AGENTS = ["codex-acp", "gemini", "opencode"]
# The keeper kills five seconds after TERM.
COUNT_AFTER_SECONDS = 8.0


@pytest.fixture
def place(real_agent: Callable[[str], RealAgent], tmp_path: Path) -> Generator[Places]:
    """Return a function that makes the place of one side."""
    with making_places(tmp_path, real_agent) as places:
        yield places


@pytest.mark.parametrize("agent", AGENTS)
def test_killed_sdk_client_leaves_no_process_only_with_banksman(agent: str, place: Places) -> None:
    ours, left = talk_and_kill("banksman.acp", place("banksman", agent))
    theirs, control_left = talk_and_kill("acp", place("plain", agent))
    assert left == {}
    assert control_left, "the control has left nothing, so this test shows nothing"
    assert ours == theirs
    assert [reply["stop_reason"] for reply in ours] == ["end_turn", "end_turn"]
    assert "the tool runs" in ours[0]["text"]
    assert "hello" in ours[1]["text"]


def talk_and_kill(module: str, place: Place) -> tuple[list[Reply], dict[int, str]]:
    """Hold a conversation, kill the client, and return the replies and the processes that are left later."""
    prompts = [f"{place.tool()}\n@@text the tool runs", "@@text hello"]
    order: Order = {"command": place.command(), "env": place.env(), "cwd": str(place.work), "prompts": prompts}
    with client(module, order) as program:
        heard = replies(program, len(prompts))
        wait(place.is_tool_up, "the tool")
        place.check_tool()
        program.kill()
        program.wait()
        return heard, place.start_count(after_seconds=COUNT_AFTER_SECONDS).result()
