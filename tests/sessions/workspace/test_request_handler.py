"""Files and terminals as callbacks of a session: each request gets one answer, from the workspace of its process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from tests.process.helpers import alive, child
from tests.sessions.workspace.test_terminals import TREE, said

from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.session.effects import CallBack, EndTerminals
from banksman.core.session.facts import CallbackAnswered, TerminalsEnded
from banksman.sessions.driver import Driver
from banksman.sessions.hooks import Hooks
from banksman.sessions.tools import Callbacks, ToolServer
from banksman.sessions.workspace import Workspace


class Door:
    """Fake of a driver that records the facts."""

    def __init__(self) -> None:
        self._answers: dict[str, asyncio.Future[CallbackAnswered]] = {}
        self.ended: list[TerminalsEnded] = []

    def now(self) -> float:
        return 0.0

    def dispatch(self, fact: CallbackAnswered | TerminalsEnded) -> None:
        if isinstance(fact, TerminalsEnded):
            self.ended.append(fact)
        else:
            self._answers[fact.request].set_result(fact)

    def expect(self, request: str) -> None:
        self._answers[request] = asyncio.get_running_loop().create_future()

    async def answer(self, request: str) -> CallbackAnswered:
        return await self._answers[request]


class Case:
    """Callbacks of a session whose process has a workspace."""

    def __init__(self, root: Path) -> None:
        self.door = Door()
        self.root = root
        self.callbacks = Callbacks(cast(Driver, self.door), Hooks({}), ToolServer(()))
        self.callbacks.work_in(Workspace(str(root)))
        self._requests = 0

    def ask(self, method: str, **params: Any) -> str:
        """Send a request of the agent, and return its id."""
        self._requests += 1
        request = str(self._requests)
        self.door.expect(request)
        self.callbacks.call(CallBack(7, Requested(request, RequestPurpose.WORKSPACE, subtype=method, input=params)))
        return request

    async def result(self, request: str) -> Any:
        answered = await self.door.answer(request)
        assert (answered.process, answered.request, answered.error) == (7, request, "")
        return answered.response

    async def error(self, request: str) -> str:
        answered = await self.door.answer(request)
        assert answered.response is None
        return answered.error

    async def tree(self, marker: str) -> str:
        command, *args = child(TREE, marker)
        id = (await self.result(self.ask("terminal/create", command=command, args=args)))["terminalId"]
        assert self.callbacks.workspace is not None
        await said(self.callbacks.workspace, id, "plain", "setsid", "deaf")
        return id

    async def close(self) -> None:
        self.callbacks.end()
        await self.callbacks.wait_ended()


async def test_request_is_answered_with_result_or_error(tmp_path: Path) -> None:
    case = Case(tmp_path)
    path = f"{tmp_path}/new"
    assert await case.result(case.ask("fs/write_text_file", path=path, content="x")) == {}
    assert await case.result(case.ask("fs/read_text_file", path=path)) == {"content": "x"}
    assert "not inside the session's folder" in await case.error(case.ask("fs/read_text_file", path="/etc/passwd"))
    assert "not served here" in await case.error(case.ask("fs/delete", path=path))
    await case.close()
    assert "process has ended" in await case.error(case.ask("fs/read_text_file", path=path))


async def test_request_without_workspace_is_refused(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.callbacks.work_in(None)
    assert "not served here" in await case.error(case.ask("fs/read_text_file", path=f"{tmp_path}/new"))
    await case.close()


async def test_closed_request_ends_its_wait_and_not_the_command(tmp_path: Path) -> None:
    case = Case(tmp_path)
    created = await case.result(case.ask("terminal/create", command="sleep", args=["60"]))
    waiting = case.ask("terminal/wait_for_exit", **created)
    await asyncio.sleep(0)
    case.callbacks.close(waiting)
    assert "CancelledError" in await case.error(waiting)
    assert "exitStatus" not in await case.result(case.ask("terminal/output", **created))
    await case.close()


async def test_interrupted_turn_ends_its_commands(tmp_path: Path, marker: str) -> None:
    case = Case(tmp_path)
    waiting = case.ask("terminal/wait_for_exit", terminalId=await case.tree(marker))
    command, *args = child("stay()", marker)
    # The request comes before the interrupt, and its task has not begun yet.
    late = case.ask("terminal/create", command=command, args=args)
    case.callbacks.end_terminals(EndTerminals(1, "t", 0.0, True))
    assert "the turn was stopped" in await case.error(late)
    assert (await case.result(waiting))["signal"] == "SIGTERM"
    assert not alive(marker)
    assert [(told.process, told.turn, len(told.commands)) for told in case.door.ended] == [(1, "t", 1)]
    assert "terminalId" in await case.result(case.ask("terminal/create", command="true"))
    await case.close()


async def test_next_process_inherits_no_terminals_or_writes(tmp_path: Path, marker: str) -> None:
    case = Case(tmp_path)
    id = await case.tree(marker)
    late = case.ask("fs/write_text_file", path=f"{tmp_path}/late", content="x")
    case.callbacks.work_in(Workspace(str(tmp_path)))
    assert "process has ended" in await case.error(late)
    assert "there is no terminal" in await case.error(case.ask("terminal/output", terminalId=id))
    assert "terminalId" in await case.result(case.ask("terminal/create", command="true"))
    await case.close()
    assert not alive(marker)
    assert not (tmp_path / "late").exists()


async def test_session_end_waits_for_its_commands(tmp_path: Path, marker: str) -> None:
    case = Case(tmp_path)
    waiting = case.ask("terminal/wait_for_exit", terminalId=await case.tree(marker))
    await asyncio.sleep(0)
    await case.close()
    assert not alive(marker)
    assert "CancelledError" in await case.error(waiting)


async def test_interrupt_spares_commands_of_earlier_turns(tmp_path: Path, marker: str) -> None:
    case = Case(tmp_path)
    await case.tree(marker)
    before = alive(marker)
    since = asyncio.get_running_loop().time()
    case.callbacks.end_terminals(EndTerminals(1, "t", since, True))
    assert not case.door.ended
    await case.result(case.ask("terminal/create", command="sleep", args=["60"]))
    case.callbacks.end_terminals(EndTerminals(1, "t", since, False))
    case.callbacks.end_terminals(EndTerminals(1, "t", since, True))
    assert [[swept.command for swept in told.commands] for told in case.door.ended] == [["sleep 60"], ["sleep 60"]]
    assert alive(marker) == before
    await case.close()
    assert not alive(marker)
