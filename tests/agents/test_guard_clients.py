"""Real ACP agents that a real client starts through `banksman guard`, without knowing of it.

The clients are that of the protocol's Python SDK and `acpx`. Each of them holds the same conversation with the agent
with and without a guard. Then the client is killed during a turn: one tool of the agent runs in the background and one
in the foreground, each with a child that ignores TERM. With a guard no process of the agent is left after the grace
period. Without it some are: that is the control.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from tests.acp_client import Order, Reply, client, replies
from tests.agents import acpx
from tests.agents.agents import RealAgent
from tests.agents.ground import kill_marked, wait
from tests.agents.matrix.place import Place, Places, making_places
from tests.guard.running import SOURCE, guard

# Claude Code and the app-server of Codex do not speak ACP.
AGENTS = ["codex-acp", "gemini", "opencode"]
# The guard kills five seconds after TERM.
COUNT_AFTER_SECONDS = 8.0

TalkAndKill = Callable[[Place, Order], list[Reply]]


@pytest.fixture
def place(real_agent: Callable[[str], RealAgent], tmp_path: Path) -> Generator[Places]:
    """Return a function that makes the place of one side."""
    with making_places(tmp_path, real_agent) as places:
        yield places


@pytest.mark.parametrize("agent", AGENTS)
def test_killed_sdk_client_leaves_no_process_of_a_guarded_agent(agent: str, place: Places) -> None:
    compare(talk_by_sdk, agent, place)


@pytest.mark.parametrize("agent", AGENTS)
def test_killed_acpx_leaves_no_process_of_a_guarded_agent(agent: str, place: Places) -> None:
    compare(talk_by_acpx, agent, place)


def compare(talk: TalkAndKill, agent: str, place: Places) -> None:
    """Hold the conversation and kill the client, with a guard and without."""
    guarded, left = talk_and_count(talk, place("guard", agent), is_guarded=True)
    plain, control_left = talk_and_count(talk, place("plain", agent), is_guarded=False)
    assert left == {}
    assert control_left, "the control has left nothing, so this test shows nothing"
    assert guarded == plain
    assert [reply["stop_reason"] for reply in guarded] == ["end_turn", "end_turn"]
    assert "the tool runs" in guarded[0]["text"]
    assert "hello" in guarded[1]["text"]


def talk_and_count(talk: TalkAndKill, place: Place, *, is_guarded: bool) -> tuple[list[Reply], dict[int, str]]:
    """Return the replies of the conversation, and the processes that are left later."""
    order: Order = {
        "command": guard("--", *place.command()) if is_guarded else place.command(),
        "env": {**place.env(), "PYTHONPATH": SOURCE},
        "cwd": str(place.work),
        "prompts": [
            f"{place.tool()}\n@@text the tool runs",
            "@@text hello",
            place.tool("foreground", is_background=False),
        ],
    }
    heard = talk(place, order)
    return heard, place.start_count(after_seconds=COUNT_AFTER_SECONDS).result()


def talk_by_sdk(place: Place, order: Order) -> list[Reply]:
    with client("acp", order) as program:
        heard = replies(program, len(order["prompts"]) - 1)
        wait_tools(place)
        program.kill()
        program.wait()
        return heard


def talk_by_acpx(place: Place, order: Order) -> list[Reply]:
    *prompts, last = order["prompts"]
    with acpx.session(order) as session:
        heard = [session.ask(prompt) for prompt in prompts]
        with session.command("prompt", last) as program:
            wait_tools(place)
            owner = session.owner()
            assert owner is not None
            # The command first: without an owner it could start another one.
            program.kill()
            kill_marked(owner.pid, place.mark)
        return heard


def wait_tools(place: Place) -> None:
    """Block until both tools and their children run."""
    for name in ("tool", "foreground"):
        wait(lambda name=name: place.is_tool_up(name), f"the {name}")
        place.check_tool(name)
