"""Conversations: each belongs to one session; forks, resumes, and the private configuration of MCP servers.

A process gets the MCP servers in a way that no other user of the machine can read.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.crowd import Crowd, argv, crowd, recalled
from tests.sessions.helpers import QUICK, Case, bodies, check, opened, prompts

from banksman import Host, Kind, NotOwner, Question, Tool, UsageError
from banksman.core.session import event as kinds
from banksman.runtime.base_host import Host as PlainHost
from banksman.store.memory import MemoryLog
from banksman.testing import fake_agent

UNKNOWN = "11111111-2222-4333-8444-555555555555"


def conversation_of(case: Case) -> str:
    conversation = case.session.status().conversation
    assert conversation is not None
    return conversation


async def begun(them: Crowd, prompt: str = "begun") -> str:
    """Return a conversation that the agent knows and that no session has."""
    case = await them.open("elsewhere")
    await case.answer(prompt)
    await case.session.close()
    return conversation_of(case)


# -- ownership -------------------------------------------------------------------------------------------------------
async def test_conversation_is_driven_by_one_session_only(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        conversation = await begun(them)
        first = await them.open("first", resume=conversation)
        with pytest.raises(NotOwner, match=first.session.id) as refusal:
            await them.open("second", resume=conversation)
        assert refusal.value.ids["session"] == first.session.id
        # The refused open leaves neither a session nor a process, also none for the first session.
        assert first.session in them.host.sessions()
        assert len(them.host.sessions()) == 2
        assert them.alive() == []
        assert await recalled(first) == ["begun"]
        await first.session.close()
        second = await them.open("second", resume=conversation)
        assert await recalled(second) == ["begun", "@@recall"]


async def test_conversation_is_owned_once_session_learns_its_name(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        first = await them.open("first")
        await first.answer("one")
        with pytest.raises(NotOwner, match=first.session.id):
            await them.open("second", resume=conversation_of(first))
        assert len(them.alive()) == 1


async def test_conversation_stays_owned_without_a_process(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        first = await them.open("first", options={"idle_seconds": 0.05})
        await first.answer("one")
        await first.wait_kind(kinds.PROCESS_EXITED)
        with pytest.raises(NotOwner):
            await them.open("second", resume=conversation_of(first))


async def test_conversation_leases_are_shared_by_hosts_of_one_log(tmp_path: Path) -> None:
    log = MemoryLog()
    async with PlainHost(lambda: log) as one, PlainHost(lambda: log) as two:
        command = fake_agent.command(memory=tmp_path)
        first = await one.open("claude", command=command, options=QUICK)
        await (await first.ask("one")).outcome()
        conversation = first.status().conversation
        with pytest.raises(NotOwner, match=first.id):
            await two.open("claude", command=command, options=QUICK, resume=conversation)
        await first.close()
        second = await two.open("claude", command=command, options=QUICK, resume=conversation)
        assert (await (await second.ask("@@recall")).outcome()).text == '["one", "@@recall"]'
        with pytest.raises(NotOwner, match=second.id):
            await one.open("claude", command=command, options=QUICK, resume=conversation)
        await second.close()


def init_of(conversation: str) -> str:
    """Return the frame by which an agent reports, unasked, that it is in this conversation."""
    return json.dumps({"type": "system", "subtype": "init", "session_id": conversation})


@pytest.mark.parametrize("when", ["in a turn", "between turns"])
async def test_agent_is_dropped_when_it_enters_conversation_of_another_session(tmp_path: Path, when: str) -> None:
    async with crowd(tmp_path) as them:
        first, second = await them.open("first"), await them.open("second")
        await first.answer("one")
        taken = conversation_of(first)
        pid = first.session.status().pids
        running = await first.running("long")
        await second.answer("two")
        own = conversation_of(second)
        if when == "in a turn":
            outcome = await second.answer(f"@@raw {init_of(taken)}\n@@hang")
            assert outcome.kind is Kind.FAILED
            assert first.session.id in str(outcome.error)
        else:
            await second.answer(f"@@at idle raw {init_of(taken)}\n@@say three")
        await second.wait_kind(kinds.PROCESS_EXITED)
        # The next process does not continue the conversation of the other session either.
        assert (await second.answer("four")).text == "four"
        assert conversation_of(second) != taken
        assert f"--resume={taken}" not in argv(second, 2)
        # It continues the one that the session had.
        assert conversation_of(second) == own
        # The first session is not affected.
        assert running.state == "running"
        assert first.session.status().pids == pid
        await running.interrupt()
        assert [text.partition("\n")[0] for text in await recalled(first)] == ["one", "long"]


async def test_conversation_ownership_follows_agent_that_switches_conversation(
    tmp_path: Path,
) -> None:
    async with crowd(tmp_path) as them:
        first = await them.open("first")
        await first.answer("one")
        before = conversation_of(first)
        boundary = {"type": "result", "subtype": "success", "is_error": False, "session_id": UNKNOWN}
        await first.answer(f"two\n@@at idle raw {json.dumps(boundary)}")
        await first.wait_event(lambda e: e.kind == kinds.SESSION_CONVERSATION and UNKNOWN.encode() in e.data)
        with pytest.raises(NotOwner, match=first.session.id):
            await them.open("second", resume=UNKNOWN)
        second = await them.open("second", resume=before)
        assert len(await recalled(second)) == 2


# -- forks -----------------------------------------------------------------------------------------------------------
async def test_fork_begins_with_memory_and_both_sessions_continue(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        first = await them.open("first", name="first")
        await first.answer("both")
        second = await them.fork(first, name="second")
        assert them.host.session("second") is second.session
        assert second.session.status().conversation is None
        assert len(them.alive()) == 1
        assert await recalled(second) == ["both"]
        assert conversation_of(first) != conversation_of(second)
        await first.answer("first only")
        await second.answer("second only")
        assert await recalled(first) == ["both", "first only"]
        assert await recalled(second) == ["both", "@@recall", "second only"]
        assert f"--resume={conversation_of(first)}" in argv(second, 1)
        assert "--fork-session" in argv(second, 1)
        assert len(first.processes) == len(second.processes) == 1


async def test_fork_can_be_forked(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        first = await them.open("first", name="first")
        await first.answer("one")
        second = await them.fork(first, name="second")
        await second.answer("two")
        third = await them.fork(second)
        assert await recalled(third) == ["one", "two"]
        assert len({conversation_of(case) for case in (first, second, third)}) == 3


async def test_fork_copies_options_of_original_and_shares_no_state(tmp_path: Path) -> None:
    asked: list[str] = []

    def allow(question: Question) -> str:
        asked.append(question.tool)
        return "allow"

    tool = Tool("wait", "Waits", {"type": "object"}, lambda _: "done")
    async with crowd(tmp_path) as them:
        first = await them.open("first", on_question=allow, tools=[tool])
        await first.answer("one")
        await first.session.set_model("other")
        second = await them.fork(first)
        # A fork that has no ask yet can be forked: the copy begins with the same memory.
        third = await them.fork(second)
        assert (await second.answer("@@ask Bash\n@@say two")).text == "two"
        assert asked == ["Bash"]
        assert "--model=other" in argv(second, 1)
        assert await recalled(third) == ["one"]
        callbacks = [case.session._here.callbacks for case in (first, second, third)]  # pyright: ignore[reportPrivateUsage]
        assert len({id(each.server) for each in callbacks}) == len({id(each.hooks) for each in callbacks}) == 3


async def test_fork_is_resumed_and_not_forked_again(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        first = await them.open("first")
        await first.answer("one")
        second = await them.fork(first)
        await second.answer("@@say two\n@@at idle exit 0")
        await second.wait_kind(kinds.PROCESS_EXITED)
        assert (await recalled(second))[0] == "one"
        assert f"--resume={conversation_of(second)}" in argv(second, 2)
        assert "--fork-session" not in argv(second, 2)


async def test_fork_leaves_original_with_its_owner(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        first = await them.open("first")
        running = await first.running("long")
        conversation = conversation_of(first)
        # Neither a fork nor an open with `fork` takes the conversation, even while it is in use.
        second = await them.fork(first)
        third = await them.open("third", resume=conversation, fork=True)
        assert len(await recalled(second)) == len(await recalled(third)) == 1
        assert running.state == "running"
        with pytest.raises(NotOwner, match=first.session.id):
            await them.open("fourth", resume=conversation)
        await first.session.close()
        fourth = await them.open("fourth", resume=conversation)
        assert len(await recalled(fourth)) == 1


async def test_fork_fails_when_agent_resumes_original_instead(tmp_path: Path) -> None:
    """The agent resumes the original instead. The next ask must not begin an empty conversation without notice."""
    drops = "import os, sys; os.execv(sys.argv[1], [word for word in sys.argv[1:] if word != '--fork-session'])"
    async with crowd(tmp_path) as them:
        first = await them.open("first")
        await first.answer("one")
        command = [sys.executable, "-I", "-S", "-c", drops, *them.command("second")]
        second = await them.open("second", command=command, resume=conversation_of(first), fork=True)
        outcome = await second.answer("two\n@@hang")
        assert outcome.kind is Kind.FAILED
        assert first.session.id in str(outcome.error)
        assert second.session.status().conversation is None
        await second.answer("three")
        assert f"--resume={conversation_of(first)}" in argv(second, 2)


async def test_fork_of_unforkable_session_is_usage_error(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        first = await them.open("first", name="first")
        with pytest.raises(UsageError, match="it has no conversation yet"):
            await them.host.fork(first.session)
        await first.answer("one")
        with pytest.raises(UsageError, match="already"):
            await them.host.fork(first.session, name="first")
        with pytest.raises(UsageError, match="no session"):
            await them.host.fork("nobody")
        with pytest.raises(UsageError, match="cannot fork: no conversation is given"):
            await them.open("second", fork=True)
        await first.session.close()
        with pytest.raises(UsageError, match="not open here"):
            await them.host.fork(first.session)
        assert them.alive() == []


async def test_fork_of_unknown_conversation_fails_then_begins_fresh(
    tmp_path: Path,
) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", resume=UNKNOWN, fork=True)
        assert (await case.answer("go on with it")).kind is Kind.FAILED
        assert await recalled(case) == []
        lost = bodies(await case.events(), kinds.SESSION_CONTEXT_LOST)
        assert [body["conversation"] for body in lost] == [UNKNOWN]
        assert "--fork-session" not in argv(case, 2)


# -- resumes ---------------------------------------------------------------------------------------------------------
async def test_conversation_begun_outside_banksman_is_adopted(tmp_path: Path) -> None:
    """The conversation was begun without Banksman: the agent was run by hand, and only its memory exists."""
    (tmp_path / "memory").mkdir()
    lines = [json.dumps([kind, "by hand"]) for kind in ("process", "read", "prompt")]
    (tmp_path / "memory" / f"{UNKNOWN}.jsonl").write_text("\n".join(lines) + "\n")
    async with opened(tmp_path, memory=True, resume=UNKNOWN) as case:
        assert case.session.status().conversation == UNKNOWN
        assert await recalled(case) == ["by hand"]
        assert f"--resume={UNKNOWN}" in argv(case, 1)
        assert conversation_of(case) == UNKNOWN
        assert kinds.SESSION_CONTEXT_LOST not in await case.kinds()


async def test_unknown_conversation_fails_then_begins_fresh_and_frees_its_name(
    tmp_path: Path,
) -> None:
    async with crowd(tmp_path) as them:
        first = await them.open("first", resume=UNKNOWN)
        assert (await first.answer("go on with it")).kind is Kind.FAILED
        assert (await first.answer("one")).text == "one"
        lost = bodies(await first.events(), kinds.SESSION_CONTEXT_LOST)
        assert [body["conversation"] for body in lost] == [UNKNOWN]
        assert "No conversation found" in lost[0]["error"]
        assert prompts(first) == ["one"]
        assert conversation_of(first) != UNKNOWN
        # The conversation that the session gave up is free.
        second = await them.open("second", resume=UNKNOWN)
        assert UNKNOWN in str((await second.answer("two")).error)


@pytest.mark.parametrize("resume", ["", 7, ["x"]])
async def test_resume_refuses_value_that_is_no_name(resume: object) -> None:
    async with Host() as host:
        with pytest.raises(UsageError, match="resume"):
            await host.open("claude", command=fake_agent.command(), resume=resume)  # pyright: ignore[reportArgumentType]


# -- MCP servers, private to the agent -------------------------------------------------------------------------------
SERVERS = [
    {"name": "files", "command": "npx", "args": ["-y", "files"], "env": [{"name": "KEY", "value": "sesame-1"}]},
    {
        "type": "http",
        "name": "web",
        "url": "https://example.com/mcp",
        "headers": [{"name": "Authorization", "value": "sesame-2"}],
    },
]
CONFIG = {
    "mcpServers": {
        "files": {"command": "npx", "args": ["-y", "files"], "env": {"KEY": "sesame-1"}},
        "web": {"type": "http", "url": "https://example.com/mcp", "headers": {"Authorization": "sesame-2"}},
    }
}
# Reads the configuration twice, because agents do so, copies it to a file, and then becomes the agent.
READER = """
import os, sys
out, *command = sys.argv[1:]
(path,) = [word.partition("=")[2] for word in command if word.startswith("--mcp-config=")]
for number in range(2):
    with open(path) as source, open(f"{out}-{os.getpid()}-{number}", "w") as file:
        file.write(source.read())
with open(f"/proc/{os.getpid()}/cmdline") as source, open(f"{out}-words-{os.getpid()}", "w") as file:
    file.write(source.read())
os.execv(command[0], command)
"""


def reader(folder: Path, script: Any = ()) -> list[str]:
    agent = fake_agent.command(script, evidence=folder / "evidence", memory=folder / "memory")
    return [sys.executable, "-I", "-S", "-c", READER, str(folder / "config"), *agent]


def configs(folder: Path) -> list[Any]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("config-[0-9]*"))]


def private_fds() -> list[str]:
    """Return the fds of this process on files without a name."""
    found: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # The fd that listed the folder.
        if target.endswith("(deleted)"):
            found.append(target)
    return found


async def test_mcp_servers_reach_process_and_stay_private(tmp_path: Path) -> None:
    before = private_fds()
    async with Host() as host:
        session = await host.open("claude", command=reader(tmp_path), options=QUICK, mcp_servers=SERVERS)
        case = Case(host, session, tmp_path)
        await case.answer("@@say one\n@@at idle exit 0")
        await case.wait_kind(kinds.PROCESS_EXITED)
        # Each process can read it, any number of times.
        await case.answer("two")
        assert configs(tmp_path) == [CONFIG] * 4
        (word,) = [word for word in argv(case, 1) if word.startswith("--mcp-config=")]
        assert word.startswith("--mcp-config=/dev/fd/")
        for file in tmp_path.glob("config-words-*"):
            assert "sesame" not in file.read_text()
        pid = session.status().pids[0]
        assert b"sesame" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"sesame" not in Path(f"/proc/{pid}/environ").read_bytes()
        # The configuration is in no folder where another user could find it, and not in the log.
        assert private_fds() != before
        assert not any(b"sesame" in event.data for event in await case.events())
        await session.close()
        check(case, await case.events())
        assert private_fds() == before


async def test_mcp_servers_fd_is_closed_with_session(tmp_path: Path) -> None:
    before = private_fds()
    async with Host() as host:
        how: dict[str, Any] = {"command": reader(tmp_path), "options": QUICK, "mcp_servers": SERVERS}
        unused = await host.open("claude", **how)
        named = await host.open("claude", name="x", **how)
        assert await host.open("claude", name="x", **how) is named
        await (await named.ask("one")).outcome()
        fork = await host.fork(named)
        assert len(private_fds()) == len(before) + 3
        await named.close()
        # The fork has a separate fd.
        await (await fork.ask("two")).outcome()
        await fork.close()
        await unused.close()
        assert configs(tmp_path) == [CONFIG] * 4
        assert private_fds() == before
        # A failed open leaves no fd either.
        other = await host.open("claude", resume=UNKNOWN, command=fake_agent.command(), options=QUICK)
        with pytest.raises(NotOwner):
            await host.open("claude", resume=UNKNOWN, **how)
        await other.close()
        gc.collect()
        assert private_fds() == before


async def test_mcp_servers_identify_process_without_fd_number(tmp_path: Path) -> None:
    async with Host() as host:
        how: dict[str, Any] = {"name": "x", "command": reader(tmp_path), "options": QUICK}
        session = await host.open("claude", mcp_servers=SERVERS, **how)
        case = Case(host, session, tmp_path)
        await case.answer("one")
        assert await host.open("claude", mcp_servers=SERVERS, **how) is session
        await case.answer("two")
        assert len(case.processes) == 1
        changed: list[Mapping[str, Any]] = [SERVERS[0], {**SERVERS[1], "url": "https://example.com/other"}]
        assert await host.open("claude", mcp_servers=changed, **how) is session
        assert len(await recalled(case)) == 2
        assert len(case.processes) == 2
        *_, last = configs(tmp_path)
        assert [config["mcpServers"]["web"]["url"] for config in configs(tmp_path)].count(
            "https://example.com/other"
        ) == 2, last


@pytest.mark.parametrize(
    "servers",
    [
        pytest.param("npx", id="text"),
        pytest.param({"files": {"command": "npx"}}, id="mapping"),
        pytest.param(["npx"], id="words"),
        pytest.param([{"command": "npx"}], id="no name"),
        pytest.param([{"name": "", "command": "npx"}], id="empty name"),
        pytest.param([{"name": 7, "command": "npx"}], id="name is a number"),
        pytest.param([{"name": "a"}], id="neither command nor url"),
        pytest.param([{"name": "a", "url": "https://example.com"}], id="no type"),
        pytest.param([{"name": "a", "command": "npx", "args": "-y"}], id="args are text"),
        pytest.param([{"name": "a", "command": "npx", "args": [1]}], id="args are numbers"),
        pytest.param([{"name": "a", "command": "npx", "env": {"K": "v"}}], id="env is a mapping"),
        pytest.param([{"name": "a", "command": "npx", "env": [{"name": "K"}]}], id="no value"),
        pytest.param([{"name": "a", "command": "npx", "env": [{"name": ["K"], "value": "v"}]}], id="name is a list"),
        pytest.param([{"name": "a", "command": "npx", "env": [{"name": "K", "value": 7}]}], id="value is a number"),
        pytest.param([{"name": "a", "command": "npx", "env": [{"name": "K", "value": object()}]}], id="no JSON"),
        pytest.param([{"name": "a", "command": "npx", "env": [{"name": "K", "value": "\ud800"}]}], id="no UTF-8"),
        pytest.param([{"name": "a", "command": "npx"}, {"name": "a", "command": "npm"}], id="same name"),
        pytest.param([{"name": "banksman", "command": "npx"}], id="our own name"),
    ],
)
async def test_mcp_servers_of_invalid_shape_are_usage_error(servers: Any) -> None:
    before = private_fds()
    async with Host() as host:
        with pytest.raises(UsageError):
            await host.open("claude", command=fake_agent.command(), mcp_servers=servers)
        assert host.sessions() == []
    assert private_fds() == before
