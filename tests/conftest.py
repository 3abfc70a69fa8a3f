"""Common setup of all tests: one event loop per coroutine test, and a check for leaked processes, fds and threads."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests import kept
from tests.cluster import shared
from tests.thorough import IS_THOROUGH, ONE_IN, sample

from banksman.process import attributes
from banksman.process.zygote_client import spawner

# These modules contain assertions but are not test modules. Pytest must register them before the first import, because
# the first import decides whether the assertions are rewritten.
pytest.register_assert_rewrite(
    *("tests.store", "tests.simulation", "tests.core", "tests.sessions", "tests.server"),
    *("tests.cluster.fleet", "tests.cli.tui", "tests.tutorial", "tests.docs.blocks", "tests.docs.handlers"),
)

# Hypothesis fails an example that exceeds its deadline. On a busy machine any example can exceed it.
settings.register_profile(
    "banksman", max_examples=sample(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("banksman")

GONE_SECONDS_MAX = 10.0
MEMORY = "/dev/shm"
MEMORY_BYTES_MIN = 2 << 30
# The zygote and its spare keeper live as long as the program.
KNOWN = ("banksman-zygote", "banksman-spare")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of a module that is thorough as a whole: some of these modules import large libraries."""
    if IS_THOROUGH or config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8") if collection_path.is_file() else ""
    return True if re.search(r"^pytestmark = (pytest\.mark\.)?thorough$", text, re.MULTILINE) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that this run does not ask for, without reporting them as skipped: see thorough.py.

    This hook runs before all others. Pytest's hook selects by `-m`, and must already see the `explored` mark of the
    Hypothesis tests.
    """
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.explored)
    kept = items[::ONE_IN]
    if not IS_THOROUGH and not config.option.markexpr:
        kept = [item for item in kept if item.get_closest_marker("thorough") is None]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    """Restore the default handlers of ignored signals.

    A process in the background (nohup, a shell's &) starts with some signals ignored. Every program that a test starts
    and signals would inherit that.
    """
    config.addinivalue_line("markers", "thorough: for `make prove` alone, see tests/thorough.py")
    config.addinivalue_line("markers", "explored: a part of it in `make test`, all of it in `make prove`")
    _use_memory()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _use_memory() -> None:
    """Keep the files of the tests in memory if there is room.

    A disk can stall for many seconds. During that time no NATS server answers, and hosts lose their leases.
    """
    try:
        memory = os.statvfs(MEMORY)
    except OSError:
        return
    is_large = memory.f_bavail * memory.f_frsize >= MEMORY_BYTES_MIN
    if "TMPDIR" not in os.environ and is_large and not memory.f_flag & os.ST_NOEXEC and os.access(MEMORY, os.W_OK):
        os.environ["TMPDIR"] = tempfile.tempdir = MEMORY
    # Without this, Node leaves its compiled modules in the folder.
    os.environ["NODE_DISABLE_COMPILE_CACHE"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in a new event loop, and fail it if it leaves a task."""
    function = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return None
    names = inspect.signature(function).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    async def run() -> None:
        await function(**arguments)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        # The garbage collector may have just dropped a generator of a library. The loop closes it in a task.
        closing = {task for task in others if type(task.get_coro()).__name__ == "async_generator_athrow"}
        if closing:
            others -= (await asyncio.wait(closing, timeout=GONE_SECONDS_MAX))[0]
        assert not others, f"tasks left behind: {others}"

    asyncio.run(run())
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure in CI, where a skipped test would go unnoticed."""
    report = yield
    if report.skipped and "CI" in os.environ:
        report.outcome = "failed"
    return report


@pytest.fixture
def marker() -> str:
    """Return a word for the argv of every process that a test starts, so that the test can find the processes."""
    return f"marked-{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a separate default store and configuration folder, never those of the user."""
    folder = tmp_path_factory.getbasetemp() / f"state-{uuid.uuid4().hex[:12]}"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Fail a test that leaves a process, an fd or a thread.

    Two kinds of processes are exempt: the zygote, which is known by its name, and shared servers. NATS nodes are known
    by their keepers. The other servers are exempt together with all their descendants.
    """
    # Start the zygote first, so that its start is not reported as a leak.
    spawner.current(attributes.take_inherited().fingerprint)
    fds, threads = _fds(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while (left := _processes()) and time.monotonic() < deadline:
        time.sleep(0.01)  # These processes are not children of this process, so there is no event to wait for.
    assert not left, f"processes left behind: {left}"
    # A thread that waited for such a process can need a little longer.
    while (more_threads := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not more_threads, f"threads left behind: {more_threads}"
    more = _fds() - fds
    assert not more, f"fds left behind: {more}"


def _fds() -> set[str]:
    """Return every open fd with its target, except those of the zygote and of the keepers of shared NATS nodes."""
    zygotes = [*spawner._retired, *([spawner._zygote] if spawner._zygote else [])]  # pyright: ignore[reportPrivateUsage]
    known = {fd for zygote in zygotes for fd in (zygote.fileno(), zygote._pidfd)}  # pyright: ignore[reportPrivateUsage]
    known |= shared.fds()
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # The fd that listed the folder.
        # The lock on spill files is held as long as a result refers to such a file: see commands/output.py.
        if int(name) not in known and not target.removesuffix(" (deleted)").endswith(".owner"):
            found.add(f"{name}: {target}")
    return found


# Processes that were not descendants of this process at the last check. They never become descendants, and no test uses
# enough pids for a reuse. So the check does not read them again after each of thousands of tests.
_foreign: set[str] = set()


def _processes() -> list[str]:
    """Return the descendants of this process, without zygotes. A keeper counts, because its child still runs."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    entries = os.listdir("/proc")
    _foreign.intersection_update(entries)
    for entry in entries:
        if entry.isdigit() and entry not in _foreign:
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    name, _, rest = file.read().decode(errors="replace").partition(" (")[2].rpartition(") ")
            except OSError:
                continue
            state, parent = rest.split()[:2]
            parents[int(entry)] = int(parent)
            names[int(entry)] = f"{name} {state}"
    mine: list[str] = []
    apart = shared.keepers() | kept.SERVERS
    for pid in parents:
        ancestor, seen = pid, 0
        while ancestor in parents and ancestor not in apart and ancestor != os.getpid() and seen < 100:
            ancestor, seen = parents[ancestor], seen + 1
        if ancestor == 0 or str(ancestor) in _foreign:
            # A process whose parent exited during the scan is not added: it can be a descendant.
            _foreign.add(str(pid))
        elif ancestor == os.getpid() and pid != os.getpid() and not names[pid].startswith(KNOWN):
            mine.append(f"{pid} {names[pid]}")
    return mine
