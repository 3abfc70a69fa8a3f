"""Terminals of an agent: run in the root, with the given options, and ended with their purpose."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import alive, child, wait_none
from tests.sessions.workspace.test_files import flipping

from banksman.core.process_facts import (
    Exited,
    ProcessGone,
)
from banksman.errors import BanksmanError, Closed, NotFound, ProgramNotFound, Refused, UsageError
from banksman.sessions.agent_process import AgentReport
from banksman.sessions.workspace import Workspace
from banksman.sessions.workspace import terminals as run_terminals
from banksman.sessions.workspace.terminals import TERMINALS_MAX, Tail

# A tool with a child of each kind. Each child reports that it runs. The leader ends at TERM, as most do.
TREE = """
for kind in ("plain", "setsid", "deaf"):
    if fork() == 0:
        if kind == "setsid":
            os.setsid()
        if kind == "deaf":
            be_deaf()
        say(kind)
        stay()
stay()
"""
SLEEPS = {"command": "sleep", "args": ["60"]}


@contextlib.asynccontextmanager
async def working(root: Path, **how: Any) -> AsyncGenerator[Workspace]:
    workspace = Workspace(str(root), **how)
    try:
        yield workspace
    finally:
        workspace.end()
        await workspace.wait_ended()
        assert not workspace.is_running


async def create(workspace: Workspace, command: str, *args: str, **how: Any) -> str:
    created = await workspace.serve("terminal/create", {"command": command, "args": list(args), **how})
    return created["terminalId"]


async def sleeping(workspace: Workspace) -> str:
    return await create(workspace, "sleep", "60")


async def output(workspace: Workspace, id: str) -> Mapping[str, Any]:
    return await workspace.serve("terminal/output", {"terminalId": id})


async def ended(workspace: Workspace, id: str) -> Mapping[str, Any]:
    return await workspace.serve("terminal/wait_for_exit", {"terminalId": id})


async def run(workspace: Workspace, command: str, *args: str, **how: Any) -> str:
    """Run a command to its end, and return its output."""
    id = await create(workspace, command, *args, **how)
    await ended(workspace, id)
    return (await output(workspace, id))["output"]


async def said(workspace: Workspace, id: str, *words: str) -> str:
    """Wait until the output contains all words. An agent gets no event either, so the function polls."""
    while True:
        text = (await output(workspace, id))["output"]
        if all(word in text for word in words):
            return text
        await asyncio.sleep(0.002)


async def tree(workspace: Workspace, marker: str) -> str:
    id = await create(workspace, *child(TREE, marker))
    await said(workspace, id, "plain", "setsid", "deaf")
    assert len(alive(marker)) == 4
    return id


# -- commands --------------------------------------------------------------------------------------------------------
async def test_terminal_runs_command_to_its_end(tmp_path: Path) -> None:
    async with working(tmp_path) as workspace:
        id = await create(workspace, "sh", "-c", "pwd; echo to stderr >&2; exit 3")
        assert await ended(workspace, id) == {"exitCode": 3, "signal": None}
        told = await output(workspace, id)
        assert sorted(told["output"].splitlines()) == sorted([str(tmp_path), "to stderr"])
        assert (told["truncated"], told["exitStatus"]) == (False, {"exitCode": 3, "signal": None})
        assert await workspace.serve("terminal/release", {"terminalId": id}) == {}
        with pytest.raises(NotFound):
            await output(workspace, id)


async def test_terminal_names_signal_that_ended_it(tmp_path: Path) -> None:
    async with working(tmp_path) as workspace:
        assert await ended(workspace, await create(workspace, "sh", "-c", "kill -9 $$")) == {
            "exitCode": None,
            "signal": "SIGKILL",
        }
        number = signal.SIGRTMIN + 3
        id = await create(workspace, "sh", "-c", f"kill -{number} $$")
        assert (await ended(workspace, id))["signal"] == f"SIG{number}"


async def test_terminal_output_is_available_while_running(tmp_path: Path, marker: str) -> None:
    async with working(tmp_path) as workspace:
        id = await create(workspace, *child("say('first'); stay()", marker))
        assert await said(workspace, id, "first") == "first\n"
        assert await output(workspace, id) == {"output": "first\n", "truncated": False}


async def test_terminal_has_environment_of_agent_and_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    monkeypatch.setenv("SCRUBBED", "no")
    script = "echo $INHERITED-$SCRUBBED-$OPENED-$BOTH-$ASKED"
    asked = [{"name": "ASKED", "value": "a=b"}, {"name": "BOTH", "value": "asked"}]
    how: dict[str, Any] = {"env": {"OPENED": "opened", "BOTH": "opened"}, "scrub": ["SCRUBBED"]}
    async with working(tmp_path, **how) as workspace:
        assert await run(workspace, "/bin/sh", "-c", script, env=asked) == "yes--opened-asked-a=b\n"
    async with working(tmp_path, inherit_env=False, **how) as workspace:
        assert await run(workspace, "/bin/sh", "-c", script, env=asked) == "--opened-asked-a=b\n"


async def test_terminal_stdin_is_empty(tmp_path: Path) -> None:
    async with working(tmp_path) as workspace:
        assert await run(workspace, "cat") == ""


async def test_terminal_command_without_args_runs_in_shell(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("x\n")
    async with working(tmp_path) as workspace:
        assert await run(workspace, "cat 'a file' | tr x y && echo $((1 + 1))") == "y\n2\n"
        created = await workspace.serve("terminal/create", {"command": "echo /bin/sh >&2; exit 4", "args": None})
        assert (await ended(workspace, created["terminalId"]))["exitCode"] == 4
    async with working(tmp_path, env={"PATH": str(tmp_path)}) as workspace:
        # There is no other shell in the PATH.
        assert await run(workspace, 'echo "$0"') == "/bin/sh\n"


async def test_terminal_program_with_blank_in_name_is_run(tmp_path: Path) -> None:
    program = tmp_path / "my tool"
    program.write_text('#!/bin/sh\necho "$0 $#"\n')
    program.chmod(0o755)
    async with working(tmp_path) as workspace:
        assert await run(workspace, str(program)) == f"{program} 0\n"
        with pytest.raises(ProgramNotFound):
            await create(workspace, "cat 'a file' | tr", "x")


async def test_terminal_refuses_unknown_program(tmp_path: Path) -> None:
    async with working(tmp_path) as workspace:
        for command in ("no-such-program", "./nothing", "", f"{tmp_path}/nothing"):
            with pytest.raises(ProgramNotFound):
                await create(workspace, command)
        with pytest.raises(UsageError):
            await create(workspace, str(tmp_path))
        (tmp_path / "garbage").write_bytes(b"\x7fELF and no more")
        (tmp_path / "garbage").chmod(0o755)
        with pytest.raises(BanksmanError):
            await create(workspace, "./garbage")
        assert not workspace._terminals._terminals  # pyright: ignore[reportPrivateUsage]


async def test_terminal_program_is_found_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("tool", "sub/tool"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$0"; pwd -P\n')
        (tmp_path / name).chmod(0o755)
    sub = f"{tmp_path}/sub"
    async with working(tmp_path, env={"PATH": "sub:.:/bin:/usr/bin"}) as workspace:
        assert await run(workspace, "./tool") == f"./tool\n{tmp_path}\n"
        assert await run(workspace, "./tool", cwd=sub) == f"./tool\n{sub}\n"
        assert await run(workspace, "../tool", cwd=sub) == f"../tool\n{sub}\n"
        assert await run(workspace, "../sub/tool", cwd=sub) == f"../sub/tool\n{sub}\n"
        assert await run(workspace, "tool", cwd=sub) == f"./tool\n{sub}\n"
        assert await run(workspace, "tool") == f"./sub/tool\n{tmp_path}\n"


# -- folders ---------------------------------------------------------------------------------------------------------
async def test_terminal_starts_only_inside_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "sub").mkdir(parents=True)
    outside.mkdir()
    os.symlink("sub", root / "in")
    os.symlink("../outside", root / "out")
    (root / "file").touch()
    async with working(root) as workspace:
        assert await run(workspace, "pwd", "-P", cwd=f"{root}/in/.") == f"{root}/sub\n"
        assert await run(workspace, "pwd", "-P", cwd=None) == f"{root}\n"
        for cwd in (str(outside), "/", f"{root}/..", f"{root}/out", f"{root}/in/../../outside"):
            with pytest.raises(Refused, match="not inside the session's folder"):
                await create(workspace, "pwd", cwd=cwd)
        for cwd in ("sub", "", 1, f"{root}/file", f"{root}/nothing", f"{root}/\0"):
            with pytest.raises(UsageError):
                await create(workspace, "pwd", cwd=cwd)


async def test_terminal_never_starts_in_folder_swapped_for_link(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "d").mkdir(parents=True)
    outside.mkdir()
    os.symlink("../outside", root / "e")
    inside = (root / "d").stat().st_ino
    seen = {"inside": 0, "refused": 0}
    async with working(root) as workspace:
        with flipping(root / "d", root / "e"):
            while min(seen.values()) < 5 or sum(seen.values()) < 100:
                try:
                    # Compare the inode, because the name can belong to another folder again.
                    assert await run(workspace, "stat", "-c", "%i", ".", cwd=f"{root}/d") == f"{inside}\n"
                    seen["inside"] += 1
                except BanksmanError:
                    seen["refused"] += 1


# -- kept output -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("limit", "text", "kept", "is_cut"),
    [
        (5, "12345", "12345", False),
        (5, "123456", "23456", True),
        (0, "", "", False),
        (0, "1", "", True),
        (4, "ää", "ää", False),
        (3, "ää", "ä", True),
        (2, "xä", "ä", True),
        (1, "xä", "", True),
        (7, "🙂🙂", "🙂", True),
        (10**30, "12345", "12345", False),
        (None, "12345", "12345", False),
    ],
)
async def test_terminal_keeps_end_of_output(
    tmp_path: Path, limit: int | None, text: str, kept: str, is_cut: bool
) -> None:
    async with working(tmp_path) as workspace:
        id = await create(workspace, "printf", "%s", text, outputByteLimit=limit)
        await ended(workspace, id)
        told = await output(workspace, id)
        assert (told["output"], told["truncated"]) == (kept, is_cut)


async def test_terminal_output_is_bounded_by_our_maximum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_terminals, "OUTPUT_BYTES_MAX", 100)
    async with working(tmp_path) as workspace:
        for limit in (None, 101, 10**9):
            id = await create(workspace, "head", "-c", "5000000", "/dev/zero", outputByteLimit=limit)
            await ended(workspace, id)
            assert await output(workspace, id) == {
                "output": "\0" * 100,
                "truncated": True,
                "exitStatus": {"exitCode": 0, "signal": None},
            }


async def test_terminal_output_ends_unfinished_character_at_exit(tmp_path: Path) -> None:
    async with working(tmp_path) as workspace:
        assert await run(workspace, "printf", r"x\342\202") == "x\ufffd"


def test_tail_memory_is_bounded() -> None:
    tail = Tail(1000)
    for _ in range(3000):
        tail.add("stdout", b"\xc3\xa4" * 100)
        assert len(tail._kept) < 1000 + 70_000  # pyright: ignore[reportPrivateUsage]
    assert tail.text() == ("ä" * 500, True)


def test_tail_joins_character_that_comes_in_pieces() -> None:
    tail = Tail(100)
    euro = "€".encode()
    tail.add("stdout", euro[:1])
    tail.add("stderr", b"between")
    tail.add("stdout", euro[1:2])
    assert tail.text() == ("between", False)
    tail.add("stdout", euro[2:])
    assert tail.text() == ("between€", False)
    tail.add("stderr", b"\xff" + euro[:2])
    assert tail.text() == ("between€\ufffd", False)
    tail.finish()
    tail.finish()
    assert tail.text() == ("between€\ufffd\ufffd", False)


def test_tail_of_invalid_bytes_stays_within_limit() -> None:
    tail = Tail(10)
    tail.add("stdout", b"\xff" * 100)
    assert tail.text() == ("\ufffd" * 3, True)


# -- ends ------------------------------------------------------------------------------------------------------------
def _goes(event: AgentReport) -> Callable[[Workspace, str], Awaitable[None]]:
    async def hear(workspace: Workspace, _: str) -> None:
        heard: list[AgentReport] = []
        workspace.ending_with(heard.append)(event)
        assert heard == [event]
        await workspace.wait_ended()

    return hear


async def _kill(workspace: Workspace, id: str) -> None:
    await workspace.serve("terminal/kill", {"terminalId": id})


async def _release(workspace: Workspace, id: str) -> None:
    await workspace.serve("terminal/release", {"terminalId": id})


async def _end_turn(workspace: Workspace, id: str) -> None:
    workspace.stop_terminals(0.0, ends=True)
    await ended(workspace, id)


async def _end(workspace: Workspace, _: str) -> None:
    workspace.end()
    await workspace.wait_ended()


@pytest.mark.parametrize(
    "end",
    [_kill, _release, _end_turn, _end, _goes(Exited(0, None, 0.0)), _goes(ProcessGone())],
    ids=["kill", "release", "end_turn", "end", "the agent exits", "the agent is gone"],
)
async def test_terminal_end_leaves_no_process_of_its_tree(
    tmp_path: Path, marker: str, end: Callable[[Workspace, str], Awaitable[None]]
) -> None:
    async with working(tmp_path) as workspace:
        id = await tree(workspace, marker)
        async with asyncio.timeout(4):  # Less than the five seconds that a command of a user has.
            await end(workspace, id)
        assert not alive(marker)


async def test_terminal_children_end_with_their_command(tmp_path: Path, marker: str) -> None:
    code = "\nif fork() == 0:\n    os.setsid(); say('up'); stay()\nsay('leader')\nos._exit(0)"
    async with working(tmp_path) as workspace:
        id = await create(workspace, *child(code, marker))
        assert await ended(workspace, id) == {"exitCode": 0, "signal": None}
        assert not alive(marker)


async def test_killed_terminal_keeps_its_output(tmp_path: Path, marker: str) -> None:
    async with working(tmp_path) as workspace:
        id = await create(workspace, *child("say('first'); stay()", marker))
        await said(workspace, id, "first")
        for _ in range(2):
            await _kill(workspace, id)
            told = await output(workspace, id)
            assert (told["output"], told["exitStatus"]) == ("first\n", {"exitCode": None, "signal": "SIGTERM"})
        await _release(workspace, id)
        for method in ("output", "wait_for_exit", "kill", "release"):
            with pytest.raises(NotFound):
                await workspace.serve(f"terminal/{method}", {"terminalId": id})


async def test_terminal_release_wakes_every_waiter(tmp_path: Path) -> None:
    async with working(tmp_path) as workspace:
        id = await sleeping(workspace)
        waiting = [asyncio.ensure_future(ended(workspace, id)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await _release(workspace, id)
        assert await asyncio.gather(*waiting[1:]) == [{"exitCode": None, "signal": "SIGTERM"}] * 2
        assert waiting[0].cancelled()


async def test_interrupted_turn_keeps_output_of_its_terminals(tmp_path: Path) -> None:
    async with working(tmp_path) as workspace:
        first, second = [await create(workspace, "sh", "-c", "echo up; sleep 60") for _ in range(2)]
        await said(workspace, first, "up")
        workspace.stop_terminals(0.0, ends=True)
        assert [(await ended(workspace, id))["signal"] for id in (first, second)] == ["SIGTERM"] * 2
        assert (await output(workspace, first))["output"] == "up\n"
        assert await run(workspace, "echo", "next turn") == "next turn\n"


async def test_workspace_refuses_terminal_requests_after_end(tmp_path: Path) -> None:
    async with working(tmp_path) as workspace:
        id = await sleeping(workspace)
        waiting = asyncio.ensure_future(ended(workspace, id))
        await asyncio.sleep(0)
        workspace.end()
        workspace.end()
        for method, given in (("create", SLEEPS), ("output", {"terminalId": id}), ("release", {"terminalId": id})):
            with pytest.raises(Closed):
                await workspace.serve(f"terminal/{method}", given)
        assert await waiting == {"exitCode": None, "signal": "SIGTERM"}


@pytest.mark.parametrize("how", ["cancelled", "stop_terminals", "end"])
async def test_terminal_is_ended_when_its_create_is_cancelled(tmp_path: Path, marker: str, how: str) -> None:
    """The cancel comes in any pass of the loop: during the folder lookup, during the start, or after the start."""
    passes, is_created = 0, False
    while not is_created:
        async with working(tmp_path) as workspace:
            command, *args = child("stay()", marker)
            asked = workspace.serving("terminal/create", {"command": command, "args": args})
            creating = asyncio.ensure_future(asked())
            for _ in range(passes):
                await asyncio.sleep(0)
            is_created = creating.done()
            if how == "cancelled":
                creating.cancel()
            elif how == "end":
                workspace.end()
            else:
                workspace.stop_terminals(0.0, ends=True)
            with contextlib.suppress(asyncio.CancelledError, Closed):
                id = (await creating)["terminalId"]
                if how == "stop_terminals":
                    await ended(workspace, id)
            if how == "cancelled" and not is_created:
                assert not workspace._terminals._terminals  # pyright: ignore[reportPrivateUsage]
            workspace.end()
            await workspace.wait_ended()
            assert not alive(marker)
        # Most passes only wait for a thread or a process.
        passes += 1 + passes // 8


def test_closed_loop_ends_its_terminals(tmp_path: Path, marker: str) -> None:
    loop = asyncio.new_event_loop()
    workspace = Workspace(str(tmp_path))
    try:
        loop.run_until_complete(tree(workspace, marker))
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    workspace.abandon()
    wait_none(marker)


# -- limits ----------------------------------------------------------------------------------------------------------
async def test_terminals_are_bounded(tmp_path: Path) -> None:
    async with working(tmp_path) as workspace:
        ids = await asyncio.gather(*(sleeping(workspace) for _ in range(TERMINALS_MAX)))
        assert len(set(ids)) == TERMINALS_MAX
        with pytest.raises(Refused, match=f"another terminal: {TERMINALS_MAX} are running"):
            await sleeping(workspace)
        await _release(workspace, ids[0])
        await sleeping(workspace)
        with pytest.raises(Refused):
            await sleeping(workspace)
        # Ended terminals make room, the oldest first. Running ones stay.
        await _kill(workspace, ids[2])
        await _kill(workspace, ids[1])
        await sleeping(workspace)
        with pytest.raises(NotFound):
            await output(workspace, ids[1])
        assert (await output(workspace, ids[2]))["exitStatus"]["signal"] == "SIGTERM"


async def test_released_terminal_counts_until_it_has_ended(tmp_path: Path, marker: str) -> None:
    async with working(tmp_path) as workspace:
        id = await create(workspace, *child("be_deaf(); say('up'); stay()", marker))
        await asyncio.gather(*(sleeping(workspace) for _ in range(TERMINALS_MAX - 1)))
        await said(workspace, id, "up")
        releasing = asyncio.ensure_future(_release(workspace, id))
        await asyncio.sleep(0)
        with pytest.raises(Refused):
            await sleeping(workspace)
        await releasing
        await sleeping(workspace)


# -- invalid requests ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"command": None},
        {"command": ["ls"]},
        {"command": "ls\0"},
        {"command": "ls", "args": "-l"},
        {"command": "ls", "args": [1]},
        {"command": "ls", "args": ["\0"]},
        {"command": "ls", "args": ["\ud800"]},
        {"command": "ls", "args": ["x"] * 100_000},
        {"command": "ls", "args": ["x" * 5_000_000]},
        {"command": "x" * 5_000_000},
        {"command": "ls", "env": {"A": "b"}},
        {"command": "ls", "env": [{"name": "A"}]},
        {"command": "ls", "env": [{"name": 1, "value": "b"}]},
        {"command": "ls", "env": [{"name": "", "value": "b"}]},
        {"command": "ls", "env": [{"name": "A=", "value": "b"}]},
        {"command": "ls", "env": [{"name": "A", "value": "\0"}]},
        {"command": "ls", "env": ["A=b"]},
        {"command": "ls", "env": [None]},
        {"command": "ls", "outputByteLimit": -1},
        {"command": "ls", "outputByteLimit": "5"},
        {"command": "ls", "outputByteLimit": True},
    ],
)
async def test_invalid_terminal_create_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    async with working(tmp_path) as workspace:
        with pytest.raises(BanksmanError) as told:
            await workspace.serve("terminal/create", given)
        assert len(str(told.value)) < 1000
        assert not workspace.is_running


@pytest.mark.parametrize("id", [None, 1, [], {}, "", "t-0", "x" * 10_000, "\ud800"])
async def test_invalid_terminal_id_is_refused(tmp_path: Path, id: object) -> None:
    async with working(tmp_path) as workspace:
        for method in ("output", "wait_for_exit", "kill", "release"):
            with pytest.raises(UsageError) as told:
                await workspace.serve(f"terminal/{method}", {"terminalId": id})
            assert len(str(told.value).encode()) < 300


async def test_terminal_of_another_session_is_not_found(tmp_path: Path) -> None:
    async with working(tmp_path) as one, working(tmp_path) as other:
        id = await sleeping(one)
        for method in ("output", "wait_for_exit", "kill", "release"):
            with pytest.raises(NotFound):
                await other.serve(f"terminal/{method}", {"terminalId": id})
        assert "exitStatus" not in await output(one, id)


async def test_workspace_serves_only_configured_methods(tmp_path: Path) -> None:
    (tmp_path / "text").touch()
    path = {"path": f"{tmp_path}/text"}
    async with working(tmp_path, serves=("fs",)) as workspace:
        assert await workspace.serve("fs/read_text_file", path) == {"content": ""}
        with pytest.raises(UsageError, match="served methods: fs/read_text_file, fs/write_text_file"):
            await workspace.serve("terminal/create", SLEEPS)
    async with working(tmp_path, serves=("terminal",)) as workspace:
        with pytest.raises(UsageError):
            await workspace.serve("fs/read_text_file", path)
    async with working(tmp_path, serves=()) as workspace:
        with pytest.raises(UsageError, match="served methods: none"):
            await workspace.serve("fs/read_text_file", path)
    async with working(tmp_path) as workspace:
        for method in ("", "fs", "fs/", "fs/delete", "_read", "__init__", "x" * 10_000):
            with pytest.raises(UsageError, match="not served here"):
                await workspace.serve(method, {})
        nonsense: tuple[object, ...] = (None, [], "x", 1)
        for given in nonsense:
            with pytest.raises(UsageError, match="params"):
                await workspace.serve("terminal/create", given)
