"""Blocking API with real threads and real agents, including every known race between them."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest
from tests.process.count import marked
from tests.thorough import one_in
from tools import blocking_api

import banksman
from banksman import (
    BACKGROUND,
    INTERACTIVE,
    NORMAL,
    Answered,
    Closed,
    Ended,
    Finished,
    Kind,
    MachineError,
    NotOwner,
    Outcome,
    Question,
    UsageError,
    threads,
)
from banksman.testing import fake_agent
from banksman.threads import thread_call
from banksman.threads.loop_thread import LoopThread
from banksman.threads.thread_call import Latch

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK = {"eof_grace": 0.1, "grace": 2.0, "linger": 0.05, "drain_seconds": 2.0}
ENDINGS = {Kind.DONE, Kind.INTERRUPTED, Kind.PREEMPTED, Kind.WITHDRAWN, Kind.REFUSED}


@pytest.fixture
def host() -> Iterator[threads.Host]:
    with threads.Host() as host:
        yield host


def open_session(host: threads.Host, *steps: str, **how: Any) -> threads.Session:
    return host.open("claude", command=fake_agent.command(list(steps)), options=QUICK, **how)


def start(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread. `result` also joins the thread."""
    future: Future[T] = Future()
    thread = threading.Thread(target=lambda: _settle(future, function))
    thread.start()
    result = future.result

    def joined(timeout: float | None = None) -> T:
        thread.join(timeout)
        return result(0)

    future.result = joined
    return future


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


class Mark:
    """A FIFO by which an agent reports that it has reached a step."""

    def __init__(self, folder: Path, name: str = "reached") -> None:
        self.path = folder / name
        os.mkfifo(self.path)

    def wait(self) -> None:
        assert self.path.read_bytes() == b"\n"


def hanging(mark: Mark, text: str = "so far") -> str:
    """A prompt: the agent says something, reports through the mark, and waits for an interrupt."""
    return f"@@say {text}\n@@touch {mark.path}\n@@hang"


def ended(session: threads.Session) -> dict[str, str]:
    """Return the outcome of each ended turn, from the session's log."""
    async_session = session._inner  # pyright: ignore[reportPrivateUsage]

    async def read() -> list[banksman.Event]:
        return [event async for event in async_session.events(0, waits=False)]

    events = bridge_of(session).call(read)
    return {event.turn: event.body["outcome"] for event in events if event.kind == "turn.ended" and event.turn}


def bridge_of(face: threads.Host | threads.Session) -> LoopThread:
    return face._bridge  # pyright: ignore[reportPrivateUsage]


def interrupt(call: Callable[[], object], after_seconds: float | None = None) -> None:
    """Make a call whose wait Ctrl-C ends: after the answer has come, or after `after_seconds`."""
    wait, thread = Latch.wait, threading.get_ident()
    left = [1]

    def interrupted(latch: Latch, seconds: float | None = None) -> bool:
        if threading.get_ident() != thread or not left:
            return wait(latch, seconds)
        left.pop()
        wait(latch, after_seconds)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Latch, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()


# -- same names as the async API -------------------------------------------------------------------------------------
# Async methods that only the shell uses.
INNER = {
    "Host": {
        "run",
        "wait_past",
        "ready",
        "take_over",
        "need_of",
        "has_waiting_asks",
        "hand_over_commands",
        "take_over_commands",
    },
    "Session": {"events", "wait_past", "reconfigure", "find_turn", "callers_of", "holder", "running_turns"},
    "Turn": {"complete", "kept"},
    "Command": {"wait_started", "wait_over", "wait_settled", "wait_written"},
    "OutputReader": {"read_lines"},
}
# Methods that callers use without waiting. The other methods that are not async belong to the shell.
LOOKED_AT = {
    "Host": {"__init__", "session", "sessions", "commands", "command", "take_ended"},
    "Session": {
        *("id", "name", "agent", "is_closed", "move", "withdraw", "hold", "questions", "status", "close_nowait"),
        "follow",
    },
    "Turn": {"id", "session", "state"},
    "Command": {
        *("id", "argv", "pid", "state", "finished", "is_over", "result", "stop_nowait", "stdout", "stderr"),
    },
    "OutputReader": {"at_eof"},
}


@pytest.mark.parametrize("name", INNER)
def test_blocking_classes_have_names_and_signatures_of_async_ones(name: str) -> None:
    there, here = getattr(banksman, name), getattr(threads, name)
    is_async = [inspect.iscoroutinefunction, inspect.isasyncgenfunction]
    public = [each for each in dir(there) if not each.startswith("_")]
    waited_for = {each for each in public if any(check(getattr(there, each)) for check in is_async)}
    names = (waited_for - INNER[name]) | LOOKED_AT[name]
    missing = {each for each in names if not hasattr(here, each)}
    assert not missing, "give it a blocking face, or list it as the shell's own"
    for each in names:
        if callable(getattr(there, each, None)):
            wanted, found = parameters(getattr(there, each)), parameters(getattr(here, each))
            if "timeout" not in [parameter[0] for parameter in wanted]:
                found = [parameter for parameter in found if parameter != TIMEOUT]
            assert found == wanted, each


TIMEOUT = ("timeout", inspect.Parameter.KEYWORD_ONLY, None, "float | None")


def parameters(function: Callable[..., object]) -> list[tuple[str, object, object, object]]:
    """Return the parameters. Both APIs use the same class names, so their annotations are equal as text."""
    shown = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default, each.annotation) for each in shown]


def test_ask_and_wait_accepts_parameters_of_ask() -> None:
    assert parameters(threads.Session.ask_and_wait) == [*parameters(banksman.Session.ask), TIMEOUT]


@pytest.mark.parametrize("name", ["execute", "start"])
def test_blocking_functions_have_signatures_of_async_ones(name: str) -> None:
    there, here = getattr(banksman, name), getattr(threads, name)
    assert inspect.signature(here) == inspect.signature(there)
    assert (here.__name__, here.__qualname__, bool(here.__doc__)) == (name, name, True)
    assert here.__module__.startswith("banksman.threads.")


@pytest.mark.parametrize("name", INNER)
def test_blocking_methods_have_names_and_docstrings_of_their_own(name: str) -> None:
    here = getattr(threads, name)
    for each, method in inspect.getmembers(here, inspect.isfunction):
        if not each.startswith("_"):
            assert method.__module__.startswith("banksman.threads."), each
            assert method.__qualname__.endswith(f"{name}.{each}"), each
            if (there := getattr(getattr(banksman, name), each, None)) and there.__doc__:
                assert method.__doc__, each
                assert "await " not in method.__doc__, each


def test_generated_classes_equal_output_of_tool() -> None:
    for path, text in blocking_api.generated().items():
        assert path.read_text(encoding="utf-8") == text, "regenerate it: make blocking"


def test_blocking_api_check_names_stale_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "src" / "blocking_session.py"
    stale.parent.mkdir()
    stale.write_text("as it was before", encoding="utf-8")
    current = stale.with_name("blocking_host.py")
    current.write_text("as it is", encoding="utf-8")
    monkeypatch.setattr(blocking_api, "ROOT", tmp_path)
    monkeypatch.setattr(blocking_api, "generated", lambda: {stale: "as it is", current: "as it is"})
    assert blocking_api.main(["--check"]) == 1
    assert capsys.readouterr().err == "src/blocking_session.py is stale: run `make blocking`\n"
    assert blocking_api.main([]) == 0
    assert blocking_api.main(["--check"]) == 0
    assert stale.read_text(encoding="utf-8") == "as it is"


# -- turns -----------------------------------------------------------------------------------------------------------
def test_session_is_asked_and_read(host: threads.Host) -> None:
    session = open_session(host, name="reads")
    turn = session.ask("hello")
    assert turn.outcome().text == "hello"
    assert turn.outcome(timeout=0).kind is Kind.DONE
    assert turn.state == "ended"
    assert turn.said() == "hello"
    texts = [update["content"]["text"] for update in turn if update["sessionUpdate"] == "agent_message_chunk"]
    assert texts == ["hello"]
    assert session.ask_and_wait("again").text == "again"
    assert host.session("reads") == session == turn.session
    assert host.sessions() == [session]
    assert len({session, turn.session}) == 1
    assert session != turn
    assert session.status().phase == "idle"
    assert "idle" in repr(session)
    assert "ended" in repr(turn)
    assert "running" in repr(host)
    session.close()
    assert session.is_closed
    with pytest.raises(Closed):
        session.ask("too late")


def test_calls_raise_errors_of_async_api(host: threads.Host) -> None:
    session = open_session(host)
    with pytest.raises(UsageError, match="no priority"):
        session.ask("x", priority="soon")
    with pytest.raises(UsageError, match="timeout"):
        session.ask("x", timeout=-1)
    with pytest.raises(TypeError):
        session.answer(no_such="argument")  # pyright: ignore[reportCallIssue]
    with pytest.raises(UsageError):
        host.session("nobody")
    with pytest.raises(UsageError):
        session.follow("no cursor")
    assert not session.status().queue


def test_eight_threads_ask_one_session_with_all_priorities_and_interrupts(host: threads.Host) -> None:
    session = open_session(host)

    def work(number: int) -> list[tuple[threads.Turn, Outcome]]:
        turns: list[threads.Turn] = []
        priority = (BACKGROUND, NORMAL, INTERACTIVE)[number % 3]
        for step in range(4):
            turn = session.ask(f"{number}.{step}", priority=priority, on_preempt="requeue" if step % 2 else "end")
            turns.append(turn)
            if (number + step) % 3 == 0:
                receipt = turn.interrupt()
                # Or it ended by itself, before the interrupt or while it was on its way.
                assert receipt.stopped or receipt.by in ("already_over", "boundary")
        return [(turn, turn.outcome()) for turn in turns]

    workers = [start(lambda n=n: work(n)) for n in range(8)]
    outcomes = [pair for worker in workers for pair in worker.result()]
    assert len({turn.id for turn, _ in outcomes}) == 32
    assert {outcome.kind for _, outcome in outcomes} <= ENDINGS
    assert all(outcome.text for _, outcome in outcomes if outcome.kind is Kind.DONE)
    assert ended(session) == {turn.id: outcome.kind for turn, outcome in outcomes}


def test_queue_is_changed_by_turns_and_by_ids(host: threads.Host, tmp_path: Path) -> None:
    mark = Mark(tmp_path)
    session = open_session(host)
    running = session.ask(hanging(mark))
    mark.wait()
    first, second, third = (session.ask(text) for text in ("1", "2", "3"))
    session.move(third)
    session.move(second.id, before=first)
    assert [waiting.turn for waiting in session.status().queue] == [third.id, second.id, first.id]
    session.withdraw(first)
    assert first.outcome().kind is Kind.WITHDRAWN
    receipt = session.interrupt(running)
    assert (receipt.stopped, receipt.kept, receipt.queued) == (True, "so far", (third.id, second.id))
    assert session.interrupt(running.id).by == "already_over"
    assert [turn.outcome().kind for turn in (running, second, third)] == [Kind.INTERRUPTED, Kind.DONE, Kind.DONE]
    assert not session.interrupt().stopped


# -- timeouts --------------------------------------------------------------------------------------------------------
def test_outcome_timeout_only_stops_waiting(host: threads.Host, tmp_path: Path) -> None:
    mark = Mark(tmp_path)
    turn = open_session(host).ask(hanging(mark))
    mark.wait()
    with pytest.raises(TimeoutError, match=r"^timed out$"):
        turn.outcome(timeout=0.01)
    assert turn.state == "running"
    assert turn.interrupt().stopped


def test_ask_and_wait_timeout_interrupts_only_its_turn(host: threads.Host, tmp_path: Path) -> None:
    session = open_session(host)
    with pytest.raises(TimeoutError):
        session.ask_and_wait(f"@@touch {tmp_path / 'file'}\n@@hang", timeout=0.3)
    assert session.status().phase != "running"
    assert session.ask_and_wait("next").text == "next"
    assert set(list(ended(session).values())[:-1]) <= {"interrupted", "withdrawn"}


def test_ask_and_wait_timeout_withdraws_queued_ask(host: threads.Host, tmp_path: Path) -> None:
    mark = Mark(tmp_path)
    session = open_session(host)
    turn = session.ask(hanging(mark))
    mark.wait()
    with pytest.raises(TimeoutError):
        session.ask_and_wait("never", timeout=0.01)
    assert not session.status().queue
    assert turn.state == "running"
    turn.interrupt()
    assert list(ended(session).values()) == ["withdrawn", "interrupted"]


def test_ask_timeout_holds_with_blocked_loop_and_withdraws(host: threads.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_call, "SETTLE_SECONDS_MAX", 0.05)
    session = open_session(host)
    blocked, go_on = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        go_on.wait()

    blocker = start(lambda: bridge_of(host).look(block))
    blocked.wait()
    with pytest.raises(TimeoutError, match="the event loop does not respond"):
        session.ask("in vain", timeout=0.01)
    go_on.set()
    blocker.result()
    assert session.ask_and_wait("next").text == "next"
    assert list(ended(session).values()) == ["withdrawn", "done"]


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------
def test_interrupted_call_undoes_its_result(host: threads.Host, tmp_path: Path, marker: str) -> None:
    mark = Mark(tmp_path)
    session = open_session(host)
    interrupt(lambda: session.ask(hanging(mark)))
    assert not session.status().queue
    assert session.ask_and_wait("next").text == "next"
    assert set(list(ended(session).values())[:-1]) <= {"interrupted", "withdrawn"}

    interrupt(lambda: open_session(host, name="untaken"))
    host.session("untaken").wait_closed()

    interrupt(lambda: host.start(["sh", "-c", "sleep 60", marker]))
    (untaken,) = host.commands()
    assert host.wait_ended() == [untaken]
    assert untaken.wait().ended is Ended.CANCELLED

    hold = session.hold()
    interrupt(hold.__enter__)
    assert start(lambda: session.ask_and_wait("not held up", timeout=30)).result().text == "not held up"

    command = host.start(["true"])
    interrupt(host.wait_ended)
    assert host.wait_ended() == [command]
    assert not host.take_ended()

    command = host.start(["true"])
    interrupt(command.wait)
    assert host.wait_ended() == [command]
    assert not host.take_ended()


def test_ctrl_c_before_acceptance_withdraws_ask(host: threads.Host, tmp_path: Path) -> None:
    mark = Mark(tmp_path)
    session = open_session(host)
    running = session.ask(hanging(mark))
    mark.wait()
    interrupt(lambda: session.ask_and_wait("queued"), after_seconds=0)
    interrupt(running.outcome, after_seconds=0)
    assert running.state == "running"
    assert not session.status().queue
    running.interrupt()


def test_ctrl_c_in_reader_loses_and_repeats_nothing(host: threads.Host) -> None:
    session = open_session(host)
    session.ask_and_wait("hello")
    reader = session.follow()
    seqs: list[int] = []
    while len(seqs) < session.status().seq:
        # Once after the item has come, and once before there is an item.
        interrupt(reader.__next__)
        interrupt(reader.__next__, after_seconds=0)
        seqs.append(next(reader).seq)
    assert seqs == list(range(1, len(seqs) + 1))
    interrupt(reader.__next__, after_seconds=0)
    session.ask_and_wait("more")
    assert next(reader).seq == len(seqs) + 1
    reader.close()


SCRIPT = """
import atexit, json, os, signal, sys, threading
# Registered first, so that they are called last.
AT_THE_END = []
atexit.register(lambda: [call() for call in AT_THE_END])
from banksman import threads
import banksman
from banksman.testing import fake_agent
signal.alarm(60)
MARK, MARKER = sys.argv[1:]
QUICK = {"eof_grace": 0.1, "grace": 2.0, "linger": 0.05}

def say(**what):
    print(json.dumps(what), flush=True)

def open_session(host, *steps, **how):
    return host.open("claude", command=fake_agent.command(list(steps)), args=[MARKER], options=QUICK, **how)
"""


class Program:
    """A separate program that uses the blocking API and reports in lines of JSON."""

    def __init__(self, code: str, mark: Path | str = "", marker: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SCRIPT + textwrap.dedent(code), str(mark), marker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        """Wait until the program exits without errors."""
        _, errors = self.process.communicate()
        assert errors == ""
        assert self.process.returncode == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()


def test_ctrl_c_in_ask_and_wait_withdraws_ask(tmp_path: Path) -> None:
    mark = Mark(tmp_path)
    arguments = (
        """
        with threads.Host() as host:
            session = open_session(host)
            try:
                session.ask_and_wait(f"@@say half\\n@@touch {MARK}\\n@@hang")
            except KeyboardInterrupt:
                say(phase=session.status().phase)
            end = next(event for event in session.follow() if event.kind == "turn.ended")
            say(end=end.body["outcome"])
        """,
        mark.path,
    )
    with Program(*arguments) as program:
        mark.wait()
        program.process.send_signal(signal.SIGINT)
        assert program.hear()["phase"] != "running"
        assert program.hear()["end"] == "interrupted"
        program.end()


@pytest.mark.thorough
def test_ctrl_c_in_outcome_and_close_only_stops_waiting(tmp_path: Path) -> None:
    mark = Mark(tmp_path)
    arguments = (
        """
        host = threads.Host()
        session = open_session(host)
        turn = session.ask(f"@@touch {MARK}\\n@@hang")
        try:
            turn.outcome()
        except KeyboardInterrupt:
            say(state=turn.state)
        turn.interrupt()
        command = host.start(["sh", "-c", "trap '' TERM; echo; sleep 60 & wait; wait"], grace=1)
        command.read()
        try:
            say(closing=True)
            host.close()
        except KeyboardInterrupt:
            say(interrupted=True)
        host.close()
        say(ended=command.wait().ended)
        """,
        mark.path,
    )
    with Program(*arguments) as program:
        mark.wait()
        program.process.send_signal(signal.SIGINT)
        assert program.hear() == {"state": "running"}
        assert program.hear() == {"closing": True}
        program.process.send_signal(signal.SIGINT)
        assert program.hear() == {"interrupted": True}
        assert program.hear() == {"ended": "host_closed"}
        program.end()


def test_ctrl_c_in_execute_ends_the_command(tmp_path: Path, marker: str) -> None:
    mark = Mark(tmp_path)
    arguments = (
        """
        try:
            threads.execute(["sh", "-c", f"echo > {MARK}; sleep 60 & wait", MARKER])
        except KeyboardInterrupt:
            say(threads=[thread.name for thread in threading.enumerate()])
        """,
        mark.path,
        marker,
    )
    with Program(*arguments) as program:
        mark.wait()
        program.process.send_signal(signal.SIGINT)
        assert program.hear() == {"threads": ["MainThread"]}
        program.end()
        assert not marked(marker)


# -- following -------------------------------------------------------------------------------------------------------
def test_thread_follows_session_while_others_ask(host: threads.Host) -> None:
    session = open_session(host)
    follower = start(lambda: [event.seq for event in session.follow()])
    askers = [start(lambda n=n: [session.ask_and_wait(f"{n}.{s}").text for s in range(3)]) for n in range(3)]
    assert [asker.result() for asker in askers] == [[f"{n}.{s}" for s in range(3)] for n in range(3)]
    session.close()
    seqs = follower.result()
    assert seqs == list(range(1, session.status().seq + 1))


def test_shared_reader_gives_each_item_once(host: threads.Host) -> None:
    session = open_session(host)
    reader = session.follow()
    sharers = [start(lambda: [event.seq for event in reader]) for _ in range(4)]
    for text in "abc":
        session.ask_and_wait(text)
    session.close()
    seqs = sorted(seq for sharer in sharers for seq in sharer.result())
    assert seqs == list(range(1, session.status().seq + 1))


def test_reader_close_ends_wait_of_another_thread(host: threads.Host) -> None:
    session = open_session(host)
    reader = session.follow(session.status().seq)
    waiter = start(lambda: list(reader))
    _wait_for_calls(host, 1)
    reader.close()
    reader.close()
    assert waiter.result() == []
    assert list(reader) == []
    with session.follow() as other:
        pass
    assert list(other) == []


def test_abandoned_reader_leaves_nothing_in_loop(host: threads.Host) -> None:
    session = open_session(host)
    session.ask_and_wait("hello")
    before = bridge_of(host).look(lambda: len(asyncio.all_tasks()))
    for _event in session.follow():
        break
    abandoned = session.follow(session.status().seq)
    with pytest.raises(TimeoutError):  # It has a call pending when it is dropped.
        bridge_of(host).call(abandoned._feed.next, timeout=0.01)  # pyright: ignore[reportPrivateUsage]
    del abandoned
    # There is no event to wait for. Each look is a pass of the loop, and one task, as in the first count.
    while bridge_of(host).look(lambda: len(asyncio.all_tasks())) > before:
        pass


def _wait_for_calls(host: threads.Host, count: int) -> None:
    """Wait until this many calls wait in the loop."""
    bridge = bridge_of(host)
    # Each look is a pass of the loop, and counts as one call itself.
    while bridge.look(lambda: len(bridge._calls)) <= count:  # pyright: ignore[reportPrivateUsage]
        pass


# -- holds -----------------------------------------------------------------------------------------------------------
def test_hold_belongs_to_its_thread_and_is_reentrant(host: threads.Host) -> None:
    session = open_session(host)
    with session.hold():
        held = session.status().hold
        other = start(lambda: session.ask("other"))
        turn = other.result()
        with session.hold(priority=INTERACTIVE):
            assert session.status().hold == held
            assert session.ask_and_wait("inner").text == "inner"
        assert session.status().hold == held
        assert session.ask_and_wait("outer").text == "outer"
        assert turn.state == "queued"
    assert turn.outcome().text == "other"
    assert session.status().hold is None
    # The thread has left its hold: its next ask waits like any other.
    assert session.ask_and_wait("after").text == "after"


def test_hold_is_released_by_error_and_by_another_thread(host: threads.Host) -> None:
    session = open_session(host)
    with pytest.raises(ZeroDivisionError), session.hold():
        _ = 1 / 0
    assert session.status().hold is None
    hold = session.hold()
    hold.__enter__()
    start(lambda: hold.__exit__(None, None, None)).result()
    assert session.status().hold is None
    with session.hold():
        assert session.status().hold is not None
        session.close()
    other = open_session(host)
    with other.hold():
        host.close()


# -- callbacks -------------------------------------------------------------------------------------------------------
def test_blocking_call_in_loop_thread_raises_at_once(host: threads.Host) -> None:
    said: list[str] = []

    def on_question(question: Question) -> str:
        said.append(session.status().phase)
        waits: list[Callable[[], object]] = [
            lambda: session.ask("x"),
            lambda: next(session.follow()),
            lambda: session.hold().__enter__(),
            lambda: threads.execute(["true"]),
            session.close,
            host.close,
        ]
        for call in waits:
            with pytest.raises(UsageError, match="blocking call"):
                call()
        said.append(question.tool)
        return "allow"

    session = open_session(host, on_question=on_question)
    assert session.ask_and_wait("@@ask Bash\n@@say done").text == "done"
    assert said == ["running", "Bash"]


def test_question_is_answered_by_another_thread(host: threads.Host) -> None:
    session = open_session(host)
    turn = session.ask("@@ask Bash\n@@say done")
    asked = next(event for event in session.follow() if event.kind == "question.asked")
    (question,) = session.questions()
    assert question.tool == "Bash"
    assert asked.turn == turn.id
    first = session.answer(question.id, "allow")
    assert first == Answered(question.id, "allow", "answer", None, is_first=True)
    assert session.answer(question.id, "deny") == replace(first, is_first=False)
    assert turn.outcome().text == "done"


def test_callback_may_call_nonblocking_methods(host: threads.Host) -> None:
    command = host.start(["cat"], stdin="pipe", on_output=lambda _stream, _data: command.stop_nowait())
    command.write(b"now")
    assert command.wait().ended is Ended.STOPPED


# -- commands --------------------------------------------------------------------------------------------------------
def test_command_is_started_read_written_and_stopped(host: threads.Host, marker: str) -> None:
    command = host.start(["cat"], stdin="pipe")
    assert host.command(command.id) == command
    assert host.commands() == [command]
    command.write(b"hello")
    assert command.read(after=0).text == "hello"
    assert command.state == "running"
    assert not command.is_over
    with pytest.raises(TimeoutError):
        command.wait(timeout=0.01)
    command.close_stdin()
    assert command.wait().code == 0
    assert command.result() == command.finished == command.wait(timeout=0)
    assert host.take_ended() == []
    with pytest.raises(TimeoutError):
        host.wait_ended(timeout=0.01)
    sleeper = host.start(["sleep", "60"])
    sleeper.signal(signal.SIGTERM)
    assert sleeper.wait().signal == signal.SIGTERM
    assert host.start(["sleep", "60"]).stop(at_once=True).signal == signal.SIGKILL
    quick = host.start(["echo", "quick"], yield_after=30)
    assert isinstance(quick, Finished)
    assert quick.stdout.text == "quick\n"
    with pytest.raises(banksman.ProgramNotFound):
        host.start([f"no-such-{marker}"])


def test_execute_runs_in_many_threads() -> None:
    runs = [start(lambda n=n: threads.execute(["echo", str(n)]).stdout.text) for n in range(8)]
    assert [run.result() for run in runs] == [f"{n}\n" for n in range(8)]


# -- closing ---------------------------------------------------------------------------------------------------------
def test_closed_host_refuses_calls_and_keeps_learned_state(tmp_path: Path) -> None:
    mark = Mark(tmp_path)
    with threads.Host() as host:
        session = open_session(host)
        done = session.ask("hello")
        assert done.outcome().text == "hello"
        running = session.ask(hanging(mark))
        queued = session.ask("queued")
        mark.wait()
        command = host.start(["sleep", "60"])
        reader = session.follow()
    host.close()
    assert done.outcome().text == "hello"
    assert running.outcome().kind is Kind.INTERRUPTED
    assert queued.outcome(timeout=0).kind is Kind.REFUSED
    assert running.state == "ended"
    assert session.status().phase == "closed"
    assert host.sessions() == [session]
    assert command.wait().ended is Ended.HOST_CLOSED
    assert command.read().is_end
    assert "closed" in repr(host)
    calls: list[Callable[[], object]] = [
        lambda: session.ask("x"),
        lambda: session.ask_and_wait("x"),
        lambda: host.open("claude", command=fake_agent.command([])),
        lambda: host.start(["true"]),
        lambda: session.withdraw(queued),
        lambda: next(reader),
        session.hold().__enter__,
        session.close,
        running.interrupt,
        command.stop,
        host.wait_ended,
        host.drain,
    ]
    for call in calls:
        with pytest.raises(Closed):
            call()
    reader.close()


def test_close_while_eight_threads_ask_gives_every_turn_an_outcome() -> None:
    host = threads.Host()
    session = open_session(host)
    begun = threading.Barrier(9)

    def work(number: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        begun.wait()
        try:
            for step in itertools.count():
                turn = session.ask(f"{number}.{step}", priority=(BACKGROUND, NORMAL)[step % 2])
                outcomes.append(turn.outcome())
        except Closed:
            return outcomes
        raise AssertionError

    workers = [start(lambda n=n: work(n)) for n in range(8)]
    begun.wait()
    follower = session.follow()
    for event in follower:
        if event.kind == "turn.ended" and event.seq > 50:
            break
    host.close()
    outcomes = [outcome for worker in workers for outcome in worker.result()]
    assert {outcome.kind for outcome in outcomes} <= ENDINGS
    assert Kind.DONE in {outcome.kind for outcome in outcomes}
    follower.close()


@pytest.mark.parametrize("round_number", one_in(5, range(20)))
def test_call_that_races_close_is_never_lost(round_number: int) -> None:
    """A call that did not raise has taken effect: the host owns each session that a thread got, and has closed it."""
    host = threads.Host(finished_max=100_000)
    opened: list[threads.Session] = []
    enough = threading.Semaphore(0)

    def work() -> None:
        try:
            while True:
                opened.append(open_session(host))
                enough.release()
                host.sessions()
        except Closed:
            pass

    workers = [start(work) for _ in range(8)]
    for _ in range(1 + 3 * round_number):
        enough.acquire()
    closers = [start(host.close) for _ in range(2)]
    for each in (*workers, *closers):
        each.result()
    assert all(session.is_closed for session in opened)
    assert set(opened) <= set(host.sessions())


def test_thread_with_reused_id_is_not_taken_for_loop_thread() -> None:
    # The system chooses the numbers. Several threads at a time take every number that is free.
    assert any(_close_from_thread_with_number_of_loop() for _ in range(100)), "no number is used again"


def _close_from_thread_with_number_of_loop() -> bool:
    host = threads.Host()
    ended = start(lambda: bridge_of(host).call(_thread_number)).result()
    host.close()
    together = threading.Barrier(8)

    def close() -> int:
        together.wait()
        host.close()
        return threading.get_ident()

    return ended in [each.result() for each in [start(close) for _ in range(together.parties)]]


async def _thread_number() -> int:
    return threading.get_ident()


def test_close_ends_calls_that_wait_forever(host: threads.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_call, "SETTLE_SECONDS_MAX", 600.0)  # The time limit for other calls must not end them.
    session = open_session(host)
    seqs: list[int] = []

    def follow() -> None:
        for event in session.follow():
            seqs.append(event.seq)  # noqa: PERF401 (it keeps the events before the error)

    report, end, follower = start(host.wait_ended), start(session.wait_closed), start(follow)
    _wait_for_calls(host, 3)
    host.close()
    with pytest.raises(Closed):
        report.result()
    end.result()
    # The follower reaches the end of the log, or gets an error that the rest cannot be read.
    assert follower.exception() is None or isinstance(follower.exception(), Closed)
    assert seqs == list(range(1, len(seqs) + 1))


def test_close_does_not_wait_for_calls_that_never_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_call, "SETTLE_SECONDS_MAX", 0.05)
    host = threads.Host()
    stuck = start(lambda: bridge_of(host).call(asyncio.Event().wait))
    _wait_for_calls(host, 1)
    host.close()
    with pytest.raises(Closed):
        stuck.result()


def test_drain_finishes_running_turn(tmp_path: Path) -> None:
    mark, go_on = Mark(tmp_path), tmp_path / "go-on"
    host = threads.Host()
    session = open_session(host)
    turn = session.ask(f"@@touch {mark.path}\n@@wait {go_on}\n@@say whole")
    mark.wait()
    drain = start(host.drain)
    _wait_for_calls(host, 1)
    with pytest.raises(Closed):
        session.ask("more")
    go_on.touch()
    drain.result()
    assert turn.outcome().text == "whole"
    assert "closed" in repr(host)


def test_hosts_with_separate_stores_are_independent(host: threads.Host) -> None:
    with threads.Host("memory:") as other:
        here, there = open_session(host, name="same"), open_session(other, name="same")
        with here.hold(), there.hold():
            assert here.ask_and_wait("here").text == "here"
            assert there.ask_and_wait("there").text == "there"
    assert there.is_closed
    assert here.ask_and_wait("still").text == "still"


def test_hosts_with_one_store_share_session_names(host: threads.Host) -> None:
    with threads.Host() as other:
        here = open_session(host, name="same")
        with pytest.raises(NotOwner, match=f"process {os.getpid()}"):
            open_session(other, name="same")
        assert [(found.name, found.status().phase) for found in other.sessions()] == [("same", "elsewhere")]
        here.close()
        assert open_session(other, name="same").id == here.id


def test_failed_host_construction_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError):
        threads.Host("no-such-store:")

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    def fail_to_start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.events, "new_event_loop", fail)
        host = threads.Host()
        with pytest.raises(MachineError, match="loop failed"):
            open_session(host)
    with pytest.raises(MachineError, match="loop failed"):
        host.close()
    monkeypatch.setattr(threading.Thread, "start", fail_to_start)
    with pytest.raises(MachineError, match="cannot start the thread"):
        threads.Host()


def test_close_error_is_raised_and_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_self: object) -> None:
        raise banksman.StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(banksman.Host, "close", fail)
        host = threads.Host()
        with pytest.raises(banksman.StoreError, match="disk is full"):
            host.close()
    host.close()


# -- exit and fork of the program ------------------------------------------------------------------------------------
def test_exit_without_close_leaves_nothing(tmp_path: Path, marker: str) -> None:
    mark = Mark(tmp_path)
    arguments = (
        """
        host, other = threads.Host(), threads.Host()
        session = open_session(host)
        AT_THE_END.append(lambda: waiter.join() or say(closed=session.is_closed, threads=threading.active_count()))
        session.ask(f"@@hold 60 setsid\\n@@touch {MARK}\\n@@hang")
        other.start(["sh", "-c", "setsid sleep 60 & wait", MARKER])
        waiter = threading.Thread(target=session.wait_closed, daemon=True)
        waiter.start()
        with open(MARK) as file:
            assert file.read() == "\\n"
        """,
        mark.path,
        marker,
    )
    with Program(*arguments) as program:
        assert program.hear() == {"closed": True, "threads": 1}
        program.end()
        assert not marked(marker)


def test_threads_that_outlive_main_thread_keep_their_host() -> None:
    arguments = (
        """
        host = threads.Host()
        session = open_session(host)

        def work():
            threading.main_thread().join()
            say(text=session.ask_and_wait("still here").text)

        threading.Thread(target=work).start()
        """,
    )
    with Program(*arguments) as program:
        assert program.hear() == {"text": "still here"}
        program.end()


@pytest.mark.thorough
def test_forked_child_cannot_use_host_and_does_not_harm_it() -> None:
    arguments = (
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: a fork in a program with threads.
        with threads.Host() as host:
            session = open_session(host)
            turn = session.ask("hello")
            turn.outcome()
            reader = session.follow()
            next(reader)
            pid = os.fork()
            if pid == 0:
                code = 0
                try:
                    with session.hold():
                        code = 1
                except banksman.UsageError:
                    pass
                for call in (lambda: session.ask("x"), turn.outcome, session.status, host.close, lambda: next(reader)):
                    try:
                        call()
                        code = 2
                    except banksman.UsageError as error:
                        assert "fork" in str(error)
                host.__exit__(None, None, None)
                del reader
                if threads.execute(["true"]).code != 0:
                    code = 3
                with threads.Host() as own:
                    if open_session(own).ask_and_wait("mine").text != "mine":
                        code = 4
                sys.exit(code)
            say(child=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            say(text=session.ask_and_wait("still here").text)
        """,
    )
    with Program(*arguments) as program:
        assert program.hear() == {"child": 0}
        assert program.hear() == {"text": "still here"}
        program.end()
