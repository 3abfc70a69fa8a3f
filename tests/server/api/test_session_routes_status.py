"""Status of a session, moves in its queue, and the explanation of its waits."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import SECONDS_MAX, Served

from banksman import Host, Session
from banksman.sessions import status
from banksman.sessions.turn_status import preview
from banksman.testing import fake_agent

pytestmark = pytest.mark.thorough

ASKS = {"prompt 1": ['ask Bash {"command": "make test"}', "say done"]}


def wait(served: Served, path: str, is_so: Callable[[Any], bool]) -> Any:
    """Poll a path until its answer satisfies `is_so`."""
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so(shown := served.get(path)):
        assert time.monotonic() < deadline, shown
        time.sleep(0.01)
    return shown


def listed(served: Served, session: str) -> Any:
    return next(each for each in served.get("/v1/sessions")["sessions"] if each["id"] == session)


def state(wanted: str) -> Callable[[Any], bool]:
    return lambda shown: shown["state"] == wanted


# -- status ----------------------------------------------------------------------------------------------------------
def test_session_state_is_one_word_for_what_it_does(fresh: Served, tmp_path: Path) -> None:
    begin = time.time()
    session = fresh.open(ASKS, cwd=str(tmp_path), name="glance")
    path = f"/v1/sessions/{session}"
    shown = fresh.get(path)
    assert (shown["state"], shown["phase"], shown["cwd"]) == ("idle", "idle", str(tmp_path))
    assert begin - 1 <= shown["created"] <= shown["at"] <= time.time() + 1
    turn = fresh.ask(session, "may I?")
    asks = wait(fresh, path, state("asks"))
    assert (asks["holder"], len(asks["questions"])) == (turn, 1)
    assert listed(fresh, session)["state"] == "asks"
    fresh.post(f"{path}/questions/{asks['questions'][0]}", {"decision": "allow"})
    fresh.outcome(session, turn)
    idle = wait(fresh, path, state("idle"))
    assert idle["at"] > shown["at"]
    assert idle["created"] == shown["created"]
    hangs = fresh.ask(session, "@@hang")
    running = wait(fresh, path, state("running"))
    wait(fresh, path, lambda shown: shown["phase"] == "running")
    assert running["questions"] == []
    fresh.post(f"{path}/turns/{hangs}/interrupt")
    # Closed, then found again by a server that does not know its folder.
    assert fresh.request("DELETE", path).json["state"] == "gone"
    fresh.stop()
    fresh.start()
    assert listed(fresh, session)["state"] == "gone"
    assert listed(fresh, session)["cwd"] is None
    again = fresh.get(path)
    assert (again["state"], again["phase"], again["cwd"]) == ("gone", "closed", str(tmp_path))
    assert again["created"] == shown["created"]
    assert again["at"] == fresh.get(f"{path}/events?before=999999&limit=1")["events"][0]["at"]


def test_session_waiting_for_a_process_slot_is_queued(tmp_path: Path) -> None:
    with Served(tmp_path / "server", processes_max=1) as served:
        first, second = served.open(), served.open()
        turn = served.ask(first, "@@hang")
        wait(served, f"/v1/sessions/{first}", lambda shown: shown["phase"] == "running")
        served.ask(second, "and I?")
        assert wait(served, f"/v1/sessions/{second}", lambda shown: shown["queue"] != [])["state"] == "queued"
        served.post(f"/v1/sessions/{first}/turns/{turn}/interrupt")
        wait(served, f"/v1/sessions/{second}", state("idle"))


def test_session_backing_off_is_wedged(served: Served) -> None:
    """The process fails at every start, so the session waits before the next start."""
    session = served.post("/v1/sessions", {"command": ["/bin/false"], "options": {"backoff_seconds": 30}})["id"]
    for number in range(5):
        served.ask(session, f"{number}")
    shown = wait(served, f"/v1/sessions/{session}", lambda shown: shown["phase"] == "backing_off")
    assert shown["state"] == "wedged"


async def until(session: Session, wanted: str) -> None:
    async with asyncio.timeout(SECONDS_MAX):
        while session.status().state != wanted:  # noqa: ASYNC110 - no event reports the state.
            await asyncio.sleep(0.01)


async def test_session_with_unexplained_silent_agent_is_wedged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "QUIET_SECONDS_MAX", 0.3)
    async with Host("memory:") as host:
        session = await host.open("claude", command=fake_agent.command())
        turn = await session.ask("@@hang")
        await until(session, "running")
        await until(session, "wedged")
        await turn.interrupt()
        await until(session, "idle")
        # A tool may run for any time.
        turn = await session.ask('@@tool_use Bash {"command": "make"}\n@@hang')
        await until(session, "running")
        async with asyncio.timeout(SECONDS_MAX):
            while (session.status().seconds_since_in or 0.0) < 0.4:
                assert session.status().state == "running"
                await asyncio.sleep(0.01)
        assert session.status().state == "running"
        await turn.interrupt()


async def test_session_whose_process_outlives_the_ladder_is_wedged() -> None:
    async with Host("memory:") as host:
        command = fake_agent.command({"process": ["ignore eof"]})
        session = await host.open("claude", command=command, options={"eof_grace": 1.0})
        await (await session.ask("hello")).outcome()
        session.close_nowait()
        assert session.status().state == "running"
        # As if the whole time had passed.
        session._stop_seconds_max = 0.0  # pyright: ignore[reportPrivateUsage]
        await until(session, "wedged")
        await session.wait_closed()
        assert session.status().state == "gone"


def test_session_of_another_host_is_elsewhere(served: Served, tmp_path: Path) -> None:
    with Served(tmp_path / "other", store=served.settings["store"]) as other:
        session = other.open()
        assert listed(served, session)["state"] == served.get(f"/v1/sessions/{session}")["state"] == "elsewhere"


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process. Unlike wall time, it does not grow with the load of the machine."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_session_listing_of_many_is_quick(fresh: Served) -> None:
    """A page requests the list each time that it comes back."""
    for number in range(100):
        fresh.open(name=f"s{number}")
    begin = cpu_seconds(fresh.pid)
    assert len(fresh.get("/v1/sessions")["sessions"]) == 100
    assert cpu_seconds(fresh.pid) - begin < 0.5


# -- the queue -------------------------------------------------------------------------------------------------------
def test_queued_turn_shows_prompt_preview_and_time(served: Served) -> None:
    session = served.open()
    holder = served.ask(session, "@@hang\n" + "h" * 300)
    begin = time.time()
    long = served.ask(session, "x" * 1000)
    prompt = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    parts = served.post(f"/v1/sessions/{session}/turns", {"prompt": prompt})["turn"]
    shown = wait(served, f"/v1/sessions/{session}", lambda shown: shown["holder"] == holder)
    assert [each["turn"] for each in shown["queue"]] == [long, parts]
    assert [each["prompt"] for each in shown["queue"]] == ["x" * 200, "one\n\ntwo"]
    assert all(begin - 1 <= each["at"] <= time.time() for each in shown["queue"])
    why = served.get(f"/v1/sessions/{session}/why")
    assert why["holder_prompt"] == ("@@hang\n" + "h" * 300)[:200]


def test_prompt_preview_redacts_secrets(tmp_path: Path) -> None:
    with Served(tmp_path / "server", secrets=["hunter2-and-more"]) as served:
        session = served.open()
        served.ask(session, "@@hang\nhunter2-and-more")
        # The preview would cut off the end of the secret.
        served.ask(session, "y" * 190 + "hunter2-and-more")
        path = f"/v1/sessions/{session}"
        wait(served, path, lambda shown: shown["phase"] == "running" and len(shown["queue"]) == 1)
        for shown in (path, f"{path}/why", "/v1/sessions"):
            assert b"hunter2" not in served.request("GET", shown).body


def test_prompt_preview_is_bounded() -> None:
    blocks = [
        {"type": "image", "data": "AAAA"},
        {"type": "text", "text": 5},
        *[{"type": "text", "text": "z" * 9999}] * 99,
    ]
    assert preview(blocks) == "z" * 200
    assert preview([]) == ""


def test_queued_turn_is_edited_until_it_is_granted(served: Served) -> None:
    session = served.open()
    path = f"/v1/sessions/{session}/turns"
    # No edited ask preempts it.
    holder = served.ask(session, "@@hang", priority=12)
    wait(served, f"/v1/sessions/{session}", lambda shown: shown["holder"] == holder)
    first, second = (served.ask(session, f"{number}") for number in range(2))
    queue = served.request("PATCH", f"{path}/{second}", {"prompt": "better", "priority": 11}).json["queue"]
    assert [(each["turn"], each["priority"], each["prompt"]) for each in queue] == [
        (first, 10, "0"),
        (second, 11, "better"),
    ]
    statuses = {
        holder: {"prompt": "x"},
        "t-none": {"prompt": "x"},
        first: {},
        second: {"priority": "urgent"},
    }
    got = [served.request("PATCH", f"{path}/{turn}", body).status for turn, body in statuses.items()]
    assert got == [409, 404, 422, 422]
    served.post(f"{path}/{holder}/interrupt")
    assert served.outcome(session, first)["text"] == "0"
    assert served.outcome(session, second)["text"] == "better"
    events = served.get(f"/v1/sessions/{session}/events?frames=0&limit=1000")["events"]
    edited = [(event["turn"], event["body"]) for event in events if event["kind"] == "turn.edited"]
    assert edited == [(second, {"prompt": "better", "priority": 11, "caller": None})]
    granted = [event["turn"] for event in events if event["kind"] == "turn.started"]
    assert granted == [holder, second, first]


def test_queued_turn_is_moved_only_within_its_priority(served: Served) -> None:
    session = served.open()
    path = f"/v1/sessions/{session}/turns"
    holder = served.ask(session, "@@hang")
    wait(served, f"/v1/sessions/{session}", lambda shown: shown["holder"] == holder)
    first, second, third = (served.ask(session, f"{number}") for number in range(3))
    low = served.ask(session, "low", priority="background")

    def move(turn: str, before: str | None) -> Any:
        answer = served.request("POST", f"{path}/{turn}/move", {"before": before})
        return [each["turn"] for each in answer.json["queue"]] if answer.status == 200 else answer.status

    assert move(third, first) == [third, first, second, low]
    assert move(second, None) == [second, third, first, low]
    # Already there, before itself, or alone in its class: the order stays.
    assert move(second, None) == move(second, second) == move(low, None) == [second, third, first, low]
    assert served.post(f"{path}/{first}/move")["queue"][0]["turn"] == first
    assert [each["turn"] for each in served.get(f"/v1/sessions/{session}")["queue"]] == [first, second, third, low]
    # A turn of another class; running; over; unknown.
    assert move(low, first) == move(first, low) == 422
    assert move(holder, None) == move(first, holder) == 409
    served.post(f"{path}/{holder}/interrupt")
    served.outcome(session, first)
    assert move(first, None) == 409
    assert move("t-none", None) == 404
    assert served.request("POST", f"{path}/{first}/move", {"befor": None}).status == 400
    served.outcome(session, low)
    events = served.get(f"/v1/sessions/{session}/events?frames=0&limit=1000")["events"]
    moved = [event["turn"] for event in events if event["kind"] == "queue.changed"]
    assert moved == [third, second, first]
    assert [event["turn"] for event in events if event["kind"] == "turn.started"] == [holder, first, second, third, low]


# -- why -------------------------------------------------------------------------------------------------------------
def test_why_has_last_frames_and_whole_questions(served: Served) -> None:
    session = served.open(ASKS)
    path = f"/v1/sessions/{session}"
    empty = served.get(f"{path}/why")
    assert (empty["holder_prompt"], empty["last_in"], empty["last_out"]) == (None, None, None)
    assert (empty["requests"], empty["asked"]) == ([], [])
    turn = served.ask(session, "may I, " + "p" * 2000)
    wait(served, path, state("asks"))
    why = served.get(f"{path}/why")
    assert why["asked"] == served.get(f"{path}/questions")["questions"]
    assert (why["asked"][0]["tool"], why["asked"][0]["input"]) == ("Bash", {"command": "make test"})
    frames = [event for event in served.get(f"{path}/events?raw=1&limit=1000")["events"] if "frame" in event]
    for member, kind in (("last_in", "update"), ("last_out", "sent")):
        last = next(event for event in reversed(frames) if event["kind"] == kind)
        assert why[member] == {"at": last["at"], "text": last["frame"].rstrip("\n")[:500]}
    assert len(why["last_out"]["text"]) == 500
    served.post(f"{path}/questions/{why['asked'][0]['id']}", {"decision": "allow"})
    served.outcome(session, turn)


def test_why_names_unanswered_agent_requests(served: Served) -> None:
    session = served.open({"prompt 1": ["on_interrupt unanswered", "hang"]}, options={"drain_seconds": 30})
    path = f"/v1/sessions/{session}"
    turn = served.ask(session, "go")
    wait(served, path, lambda shown: shown["phase"] == "running")
    # The receipt comes with the end of the turn, so another thread waits for it.
    thread = threading.Thread(target=served.request, args=("POST", f"{path}/turns/{turn}/interrupt"))
    thread.start()
    # On a busy machine the handshake may be unanswered too. It is listed until its answer arrives.
    why = wait(served, f"{path}/why", lambda shown: [each["kind"] for each in shown["requests"]] == ["interrupt"])
    (request,) = why["requests"]
    assert 0 <= request["seconds"] < SECONDS_MAX
    assert why["state"] == "running"
    served.request("DELETE", path)
    thread.join()


def test_why_finds_the_prompt_after_a_long_answer(served: Served) -> None:
    session = served.open()
    served.outcome(session, served.ask(session, "@@stream 2000 0 x"))
    why = served.get(f"/v1/sessions/{session}/why")
    assert "@@stream 2000" in why["last_out"]["text"]


# -- the ladder ------------------------------------------------------------------------------------------------------
def test_process_stopped_event_lists_ladder_rungs(served: Served) -> None:
    begin = time.time()
    session = served.open()
    served.outcome(session, served.ask(session, "hello"))
    served.request("DELETE", f"/v1/sessions/{session}")
    events = served.get(f"/v1/sessions/{session}/events?frames=0")["events"]
    kinds = [event["kind"] for event in events]
    (stopped,) = [event for event in events if event["kind"] == "process.stopped"]
    assert kinds.index("process.exited") < kinds.index("process.stopped") < kinds.index("session.closed")
    assert stopped["body"]["process"] == 1
    rungs = stopped["body"]["ladder"]
    assert rungs[0]["rung"] == "eof"
    assert [rung["at"] for rung in rungs] == sorted(rung["at"] for rung in rungs)
    assert all(begin - 1 < rung["at"] <= stopped["at"] + 0.1 for rung in rungs)


def test_process_stopped_event_shows_kill_when_agent_ignores_everything(served: Served) -> None:
    session = served.open({"process": ["ignore eof", "ignore term"]}, options={"eof_grace": 0.1, "grace": 0.2})
    served.outcome(session, served.ask(session, "hello"))
    served.request("DELETE", f"/v1/sessions/{session}")
    events = served.get(f"/v1/sessions/{session}/events?frames=0")["events"]
    (stopped,) = [event for event in events if event["kind"] == "process.stopped"]
    eof, term, kill = stopped["body"]["ladder"]
    assert [eof["rung"], term["rung"], kill["rung"]] == ["eof", "term", "kill"]
    assert 0.05 < term["at"] - eof["at"] < kill["at"] - eof["at"]


def test_process_that_exits_by_itself_logs_no_ladder(served: Served) -> None:
    session = served.open()
    served.outcome(session, served.ask(session, "@@exit 3"))
    events = served.get(f"/v1/sessions/{session}/events?frames=0")["events"]
    assert "process.exited" in [event["kind"] for event in events]
    assert "process.stopped" not in [event["kind"] for event in events]
