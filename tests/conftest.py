"""What every test gets: coroutines run in a fresh loop, and a look round afterwards that nothing was left behind."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Generator, Iterator

import pytest
from tests.nats import shared
from tests.thorough import IS_THOROUGH

from banksman.run.child import inherited
from banksman.run.child.spawner import spawner

# What holds assertions and is no test module itself. Before anybody imports them: whoever comes first decides.
pytest.register_assert_rewrite(
    *("tests.store", "tests.sim", "tests.core", "tests.sessions", "tests.serve"),
    *("tests.browser", "tests.terminal", "tests.tutorial"),
)

GONE_SECONDS_MAX = 10.0
# The zygote and the keeper it has in reserve are there as long as the program is.
KNOWN = ("banksman-zygote", "banksman-spare")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is thorough is not skipped but left out, where it is not asked for: see thorough.py."""
    if not IS_THOROUGH and not config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("thorough") is not None]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item.get_closest_marker("thorough") is None]


def pytest_configure(config: pytest.Config) -> None:
    """Hear every signal: run in the background (nohup, a shell's &) we are started with some of them ignored, and so
    would be every program that a test starts and signals."""
    config.addinivalue_line("markers", "thorough: for `make prove` alone, see tests/thorough.py")
    config.addinivalue_line("markers", "explored: a part of it in `make test`, all of it in `make prove`")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in a loop of its own, and insist that it leaves no task."""
    function = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return None
    names = inspect.signature(function).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    async def run() -> None:
        await function(**arguments)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks left behind: {others}"

    asyncio.run(run())
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI nothing is skipped: what this machine cannot show is a failure there, and not a line nobody reads."""
    report = yield
    if report.skipped and "CI" in os.environ:
        report.outcome = "failed"
    return report


@pytest.fixture
def marker() -> str:
    """A word for the argv of every process a test starts, by which it finds them again."""
    return f"marked-{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host that is told no store has one of its own in each test, and never the user's."""
    folder = tmp_path_factory.getbasetemp() / f"state-{uuid.uuid4().hex[:12]}"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """No process, fd or thread more than before, but for the zygote, which is known by name, and the nodes of NATS that
    tests share, which are known by their keeper."""
    spawner.current(inherited.take().fingerprint)  # Warm, so that its start is not taken for a leak.
    fds, threads = _fds(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while (left := _processes()) and time.monotonic() < deadline:
        time.sleep(0.01)  # There is no fact to wait for: these are nobody's children that we could wait on.
    assert not left, f"processes left behind: {left}"
    assert set(threading.enumerate()) <= threads
    more = _fds() - fds
    assert not more, f"fds left behind: {more}"


def _fds() -> set[str]:
    """Every open fd and what it is, without the zygote's own two, and those to the keepers of nodes that are shared."""
    zygotes = [*spawner._retired, *([spawner._zygote] if spawner._zygote else [])]  # pyright: ignore[reportPrivateUsage]
    known = {fd for zygote in zygotes for fd in (zygote.fileno(), zygote._pidfd)}  # pyright: ignore[reportPrivateUsage]
    known |= shared.fds()
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # The one that listed the folder.
        if int(name) not in known:
            found.add(f"{name}: {target}")
    return found


def _processes() -> list[str]:
    """Our descendants, but for zygotes: a keeper counts, for it means that something is still kept."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    name, _, rest = file.read().decode(errors="replace").partition(" (")[2].rpartition(") ")
            except OSError:
                continue
            state, parent = rest.split()[:2]
            parents[int(entry)] = int(parent)
            names[int(entry)] = f"{name} {state}"
    mine: list[str] = []
    keepers = shared.keepers()
    for pid in parents:
        ancestor, seen = pid, 0
        while ancestor in parents and ancestor not in keepers and ancestor != os.getpid() and seen < 100:
            ancestor, seen = parents[ancestor], seen + 1
        if ancestor == os.getpid() and pid != os.getpid() and not names[pid].startswith(KNOWN):
            mine.append(f"{pid} {names[pid]}")
    return mine
