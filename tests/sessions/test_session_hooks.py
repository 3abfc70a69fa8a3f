"""`on_open` and `on_close`: programs and functions that make and remove what a session works in."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import alive, wait_until
from tests.sessions.helpers import QUICK

from banksman import Closed, HookCall, HookFailed, Host, Kind, Session, UsageError
from banksman.core.session import history as pasts
from banksman.sessions import known_agents, recovery, spec_record
from banksman.sessions.ownership import OwnershipGuard
from banksman.sessions.session_hooks import SessionHooks
from banksman.store.sqlite.sqlite_log import SqliteLog
from banksman.testing import fake_agent

# Appends a line to a file: its first argument, and the rest.
NOTE = ["sh", "-c", 'file=$0; echo "$@" >> "$file"']
FAILS = ["sh", "-c", "echo out; echo no room >&2; exit 3"]
# A tool in a session of its own that ignores TERM, and a wait.
STUCK = 'setsid sh -c \'trap "" TERM HUP; sleep 1000; sleep 1000\' "$0" & echo >> "$1"; sleep 1000'
HOST = """
import asyncio, json, sys
from banksman import Host
store, how = sys.argv[1], json.loads(sys.argv[2])
async def main():
    async with Host(store) as host:
        session = await host.open("claude", **how)
        await (await session.ask("one")).outcome()
        print("ready", flush=True)
        sys.stdin.readline()
        await session.close()
asyncio.run(main())
"""


class Scene:
    """A store, a fake agent, and a file in which the hooks leave notes."""

    def __init__(self, folder: Path) -> None:
        self.store = f"sqlite:{folder / 'log.db'}"
        self.notes = folder / "notes"
        self.how: dict[str, Any] = {
            "command": fake_agent.command(evidence=folder / "agent", memory=folder / "memory"),
            "options": QUICK,
            "cwd": str(folder),
            "name": "s",
            "on_open": self.note("open", "{session}", "{cwd}"),
            "on_close": self.note("close", "{session}"),
        }

    def note(self, *words: str) -> list[str]:
        return [*NOTE, str(self.notes), *words]

    async def open(self, host: Host, **how: Any) -> Session:
        return await host.open("claude", **{**self.how, **how})

    def said(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def answer(session: Session, prompt: str = "one") -> str | None:
    outcome = await (await session.ask(prompt)).outcome()
    assert outcome.kind is Kind.DONE, outcome.error
    return outcome.text


# -- order -----------------------------------------------------------------------------------------------------------
async def test_hooks_run_around_the_life_of_a_session(scene: Scene, tmp_path: Path) -> None:
    checks = ["sh", "-c", 'kill -0 "$(cat "$0")" 2>/dev/null; echo "close $? $1" >> "$2"']
    pid = tmp_path / "pid"
    how = {"on_close": [*checks, str(pid), "{session}", str(scene.notes)]}
    async with Host(scene.store) as host:
        session = await scene.open(host, **how)
        opened = f"open {session.id} {tmp_path}"
        assert scene.said() == [opened]
        # A session that is open here is not opened again.
        assert await scene.open(host, **how) is session
        await answer(session)
        pid.write_text(str(session.status().pids[0]))
        assert scene.said() == [opened]
        await session.close()
        # The process was gone before.
        assert scene.said() == [opened, f"close 1 {session.id}"]
        again = await scene.open(host, **how)
        assert scene.said()[2:] == [opened]
        await again.close()
    assert len(scene.said()) == 4


async def test_next_host_runs_the_recorded_hooks(scene: Scene) -> None:
    async with Host(scene.store) as host:
        session = await scene.open(host)
        await answer(session)
        await session.leave()
        # It is not closed.
        assert [line.split()[0] for line in scene.said()] == ["open"]
    async with Host(scene.store) as host:
        found = host.session("s")
        await answer(found)
        assert [line.split()[0] for line in scene.said()] == ["open", "open"]
    assert [line.split()[0] for line in scene.said()] == ["open", "open", "close"]


async def test_on_open_makes_the_folder_of_the_session(scene: Scene, tmp_path: Path) -> None:
    folder = tmp_path / "trees" / "one"
    async with Host(scene.store) as host:
        session = await scene.open(host, cwd=folder, on_open=["mkdir", "-p", "{cwd}"], on_close=["rmdir", "{cwd}"])
        assert folder.is_dir()
        await answer(session)
    assert not folder.exists()
    async with Host(scene.store) as host:
        await answer(host.session("s"))
        assert folder.is_dir()


async def test_deletion_of_a_session_that_was_not_closed_runs_on_close(scene: Scene) -> None:
    async with Host(scene.store) as host:
        session = await scene.open(host)
        await session.leave()
    async with Host(scene.store) as host:
        await host.delete("s")
        assert [line.split()[0] for line in scene.said()] == ["open", "close"]
        closed = await scene.open(host)
        await closed.close()
        await host.delete("s")
        assert [line.split()[0] for line in scene.said()] == ["open", "close"] * 2
        left = await scene.open(host)
        await left.leave()
        await host.delete("s")
    assert [line.split()[0] for line in scene.said()] == ["open", "close"] * 3


# -- failures --------------------------------------------------------------------------------------------------------
async def test_failed_on_open_refuses_the_opening_with_its_stderr(scene: Scene) -> None:
    async with Host(scene.store) as host:
        with pytest.raises(HookFailed, match=r"on_open failed: it exited with code 3: no room$"):
            await scene.open(host, on_open=FAILS)
        assert host.sessions() == []
        assert scene.said() == []
        with pytest.raises(HookFailed, match="no-such-program"):
            await scene.open(host, on_open=["no-such-program"])
        session = await scene.open(host)
        await session.close()
        events = [event.kind async for event in session.events(0, waits=False)]
        # A session that exists stays as it was.
        with pytest.raises(HookFailed, match="no room"):
            await scene.open(host, on_open=FAILS)
        found = host.session("s")
        assert [event.kind async for event in found.events(0, waits=False)] == events
        await (await scene.open(host)).close()


async def test_failed_on_close_is_logged_and_the_session_is_closed(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    async with Host(scene.store) as host:
        session = await scene.open(host, on_close=FAILS)
        with caplog.at_level(logging.WARNING):
            await session.close()
        assert session.is_closed
    assert "on_close failed: it exited with code 3: no room" in caplog.text


async def test_error_of_a_hook_has_no_secret(scene: Scene) -> None:
    async with Host(scene.store, secrets=["house-secret"]) as host:
        with pytest.raises(HookFailed) as caught:
            await scene.open(host, on_open=["sh", "-c", "echo house-${0} >&2; exit 1", "secret"])
    assert "house-secret" not in str(caught.value)
    assert "on_open failed" in str(caught.value)


async def test_on_open_that_takes_too_long_is_ended_with_its_tree(scene: Scene, tmp_path: Path, marker: str) -> None:
    async with Host(scene.store) as host:
        with pytest.raises(HookFailed, match=r"it has not ended within 0\.5 s"):
            await scene.open(
                host,
                on_open=["sh", "-c", STUCK, marker, str(tmp_path / "mark")],
                options={**QUICK, "hook_seconds": 0.5, "grace": 0.5},
            )
        assert alive(marker) == []


@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_end_of_an_opening_ends_the_tree_of_its_hook(scene: Scene, tmp_path: Path, marker: str, end: str) -> None:
    mark = tmp_path / "mark"
    async with Host(scene.store) as host:
        opening = asyncio.ensure_future(
            scene.open(host, on_open=["sh", "-c", STUCK, marker, str(mark)], options={**QUICK, "grace": 0.5})
        )
        await asyncio.to_thread(wait_until, mark.exists, "the hook")
        assert alive(marker)
        if end == "cancel":
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        else:
            await host.close()
            with pytest.raises(Closed):
                await opening
        assert alive(marker) == []


@pytest.mark.parametrize("end", ["drain", "close beside a command"])
async def test_host_that_stops_an_opening_closes_in_full(scene: Scene, tmp_path: Path, end: str) -> None:
    """The end of a host asks its openings to end several times, while the hook still ends."""
    mark = tmp_path / "mark"
    hook = ["sh", "-c", "trap '' TERM; echo >> \"$0\"; sleep 50 & wait; sleep 50", str(mark)]
    host = Host(scene.store)
    opening = asyncio.ensure_future(scene.open(host, on_open=hook, options={**QUICK, "grace": 0.5}))
    await asyncio.to_thread(wait_until, mark.exists, "the hook")
    if end == "drain":
        await host.drain()
    else:
        await host.start(["sleep", "50"], grace=0.1)
        await host.close()
    with pytest.raises(Closed):
        await opening
    await host.close()
    # The store is closed, so the next host gets it at once.
    async with Host(scene.store) as next_host:
        await (await scene.open(next_host)).close()


async def test_no_hook_opens_a_session_once_the_host_closes(scene: Scene) -> None:
    async with Host(scene.store) as host:
        session = await scene.open(host)
        (record,) = [event.body async for event in session.events(0, waits=False) if event.kind == "session.opened"]
    before = scene.said()
    spec = spec_record.rebuild("claude", record)
    hooks = SessionHooks(OwnershipGuard(), None, None, ())
    hooks.stop_opening()
    async with hooks.opening(spec, "s-other", None) as prepares:
        with pytest.raises(Closed):
            await prepares(pasts.beginning(spec.config))
    assert scene.said() == before


async def test_place_of_a_new_session_is_removed_if_its_agent_is_missing(scene: Scene, tmp_path: Path) -> None:
    async with Host(scene.store) as host:
        with pytest.raises(UsageError):
            await scene.open(host, cwd=tmp_path / "none", command=["no-such-agent"])
    assert [line.split()[0] for line in scene.said()] == ["open", "close"]


# -- functions -------------------------------------------------------------------------------------------------------
async def test_hook_may_be_a_function(scene: Scene, tmp_path: Path) -> None:
    seen: list[Any] = []

    async def begin(place: HookCall) -> None:
        await asyncio.sleep(0)
        seen.append(place)

    def end(place: HookCall) -> None:
        seen.append(place.session)

    async with Host(scene.store) as host:
        session = await scene.open(host, on_open=begin, on_close=end)
        place = HookCall(session=session.id, name="s", cwd=str(tmp_path))
        assert seen == [place]
        await session.close()
        assert seen == [place, session.id]
        # The log does not keep a function.
        with pytest.raises(UsageError, match=r"functions \(on_open, on_close\)"):
            await host.session("s").ask("one")
    assert seen == [place, session.id]


def _raises(_: HookCall) -> None:
    raise ValueError("no room")


async def _sleeps(_: HookCall) -> None:
    await asyncio.sleep(1000)


def _exits(_: HookCall) -> None:
    sys.exit(3)


def _interrupts(_: HookCall) -> None:
    raise KeyboardInterrupt


def _ends(_: HookCall) -> None:
    raise GeneratorExit


async def _exits_later(_: HookCall) -> None:
    sys.exit(3)


def _cancels(_: HookCall) -> None:
    raise asyncio.CancelledError


async def _cancels_later(_: HookCall) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (_raises, "ValueError: no room"),
        (_sleeps, "not ended"),
        (_exits, "on_open failed: SystemExit: 3"),
        (_interrupts, "on_open failed: KeyboardInterrupt"),
        (_ends, "on_open failed: GeneratorExit"),
        (_exits_later, "on_open failed: SystemExit: 3"),
        (_cancels, "on_open failed: CancelledError"),
        (_cancels_later, "on_open failed: CancelledError"),
    ],
)
async def test_failed_function_refuses_the_opening(
    scene: Scene, hook: Callable[[HookCall], Awaitable[None] | None], says: str
) -> None:
    async with Host(scene.store) as host:
        with pytest.raises(HookFailed, match=says):
            await scene.open(host, on_open=hook, options={**QUICK, "hook_seconds": 0.2})
        assert host.sessions() == []


async def test_plain_function_does_not_stop_the_loop_and_has_the_time_limit(scene: Scene) -> None:
    """The function waits for the loop, and then for the end of the test."""
    loop = asyncio.get_running_loop()
    turned, over = threading.Event(), threading.Event()
    found: list[bool] = []

    def waits(_: HookCall) -> None:
        loop.call_soon_threadsafe(turned.set)
        found.append(turned.wait(10))
        over.wait(20)

    try:
        async with Host(scene.store) as host:
            with pytest.raises(HookFailed, match="not ended"):
                await scene.open(host, on_open=waits, options={**QUICK, "hook_seconds": 0.5})
            assert found == [True]
            assert host.sessions() == []
    finally:
        over.set()


async def test_cancelled_open_is_no_failed_hook(scene: Scene) -> None:
    begun = asyncio.Event()

    async def waits(_: HookCall) -> None:
        begun.set()
        await asyncio.sleep(1000)

    async with Host(scene.store) as host:
        opening = asyncio.create_task(scene.open(host, on_open=waits))
        await begun.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening


@pytest.mark.parametrize("wrong", ["mkdir", [5], [""], 5, {"a": 1}, ["x"] * 300])
async def test_hook_that_is_no_command_is_refused(scene: Scene, wrong: Any) -> None:
    async with Host(scene.store) as host:
        for part in ("on_open", "on_close"):
            with pytest.raises(UsageError, match=part):
                await scene.open(host, **{part: wrong})


# -- environment -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("agent", known_agents.packaged())
async def test_hook_gets_the_environment_of_the_agent(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    """No secret of the host, unless the profile names it, and what the caller passes."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    keys = known_agents.load(agent).keep
    for name in ("HOUSE_API_KEY", "SSH_AUTH_SOCK", "BANKSMAN_TOKEN", *keys):
        monkeypatch.setenv(name, f"value-of-{name}")
    env = {name: str(tmp_path / name) for name in ("on_open", "on_close")}
    hooks: dict[str, Any] = {name: ["sh", "-c", f'env > "${name}"'] for name in env}
    async with Host(scene.store) as host:
        await host.open(agent, command=["true"], cwd=tmp_path, env=env, **hooks)
    for file in env.values():
        found = Path(file).read_text()
        assert {part.split("\n")[0] for part in found.split("value-of-")[1:]} == set(keys)


# -- the death of a host ---------------------------------------------------------------------------------------------
def _start(scene: Scene, **how: Any) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOST, scene.store, json.dumps({**scene.how, **how})]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _die_in_hook(scene: Scene, on_close: Sequence[str], marker: str, mark: Path) -> None:
    """Run a host that is killed while its `on_close` runs. `mark`: the file that the hook makes at its start."""
    with _start(scene, on_close=on_close) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
        host.stdin.write("\n")
        host.stdin.flush()
        wait_until(mark.exists, "the hook")
        host.kill()
        host.wait()
        wait_until(lambda: not alive(marker), "the end of the hook's tree")


@pytest.mark.thorough
async def test_close_that_a_crash_has_interrupted_is_finished_by_the_next_host(
    scene: Scene, tmp_path: Path, marker: str
) -> None:
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    # Waits, unless the gate is open.
    hook = f'[ -e "{gate}" ] && {{ echo close >> "{scene.notes}"; exit 0; }}\n{STUCK}'
    _die_in_hook(scene, ["sh", "-c", hook, marker, str(mark)], marker, mark)
    gate.touch()
    async with Host(scene.store) as next_host:
        assert len(next_host.sessions()) == 1
    assert [line.split()[0] for line in scene.said()] == ["open", "close"]
    # Once.
    async with Host(scene.store) as next_host:
        assert next_host.sessions()
    assert [line.split()[0] for line in scene.said()] == ["open", "close"]


def _interrupted(scene: Scene, tmp_path: Path, marker: str) -> Path:
    """Make a session whose host has died during `on_close`. The hook waits for the returned file."""
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    waits = 'echo >> "$1"; for i in $(seq 1000); do [ -e "$2" ] && break; sleep 0.05; done; echo close >> "$3"'
    hook = ["sh", "-c", waits, marker, str(mark), str(gate), str(scene.notes)]
    _die_in_hook(scene, hook, marker, mark)
    mark.unlink()
    return gate


async def test_close_that_a_crash_has_interrupted_delays_no_other_session(
    scene: Scene, tmp_path: Path, marker: str
) -> None:
    gate = _interrupted(scene, tmp_path, marker)
    async with Host(scene.store) as next_host:
        await next_host.take_up()
        await asyncio.to_thread(wait_until, (tmp_path / "mark").exists, "the hook again")
        assert [line.split()[0] for line in scene.said()] == ["open"]
        # The session itself is opened again behind the hook.
        opening = asyncio.ensure_future(scene.open(next_host))
        other = await scene.open(next_host, name="other", on_open=None, on_close=None)
        await answer(other)
        assert not opening.done()
        gate.touch()
        await answer(await opening)
        assert [line.split()[0] for line in scene.said()] == ["open", "close", "open"]


async def test_host_that_closes_waits_for_the_hook_that_a_crash_has_interrupted(
    scene: Scene, tmp_path: Path, marker: str
) -> None:
    gate = _interrupted(scene, tmp_path, marker)
    host = Host(scene.store)
    await host.take_up()
    closing = asyncio.ensure_future(host.close())
    await asyncio.to_thread(wait_until, (tmp_path / "mark").exists, "the hook again")
    assert not closing.done()
    gate.touch()
    await closing
    assert [line.split()[0] for line in scene.said()] == ["open", "close"]


async def test_session_stays_claimed_if_the_hook_of_its_dead_host_is_cancelled(
    scene: Scene, tmp_path: Path, marker: str
) -> None:
    _interrupted(scene, tmp_path, marker)
    begun = asyncio.Event()

    async def closes(*_: Any) -> None:
        begun.set()
        await asyncio.sleep(1000)

    log = SqliteLog(scene.store.removeprefix("sqlite:"))
    (known,) = log.sessions()
    cleaning = asyncio.ensure_future(recovery.clean_up(log, known, closes))
    await begun.wait()
    cleaning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cleaning
    await log.read(known.id, 0, 1)
    (known,) = log.sessions()
    assert known.owner is not None
    assert known.owner.is_here
    await log.close()


async def test_share_settles_the_session_of_a_dead_host_and_runs_no_hook(scene: Scene) -> None:
    with _start(scene) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
        os.kill(host.pid, signal.SIGKILL)
        host.wait()
    async with Host(scene.store) as next_host:
        (session,) = next_host.sessions()
        await session.share(["bob"])
        assert not session.is_ours
        events = [event.kind async for event in session.events(0, waits=False)]
        assert events[-1] == "session.shared"
    assert [line.split()[0] for line in scene.said()] == ["open"]


async def test_session_of_a_dead_host_is_opened_again_before_it_is_closed(scene: Scene) -> None:
    with _start(scene) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
        os.kill(host.pid, signal.SIGKILL)
        host.wait()
    async with Host(scene.store) as next_host:
        session = await scene.open(next_host)
        assert [line.split()[0] for line in scene.said()] == ["open", "open"]
        await answer(session)
    assert [line.split()[0] for line in scene.said()] == ["open", "open", "close"]
