"""What every test gets: coroutines run in a fresh loop, and a look round afterwards that nothing was left behind."""

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

# What holds assertions and is no test module itself. Before anybody imports them: whoever comes first decides.
pytest.register_assert_rewrite(
    *("tests.store", "tests.simulation", "tests.core", "tests.sessions", "tests.server"),
    *("tests.cluster.fleet", "tests.cli.tui", "tests.tutorial"),
)

# Hypothesis measures each example and fails one that took long. On a busy machine any of them does.
settings.register_profile(
    "banksman", max_examples=sample(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("banksman")

GONE_SECONDS_MAX = 10.0
MEMORY = "/dev/shm"
MEMORY_BYTES_MIN = 2 << 30
# The zygote and the keeper it has in reserve are there as long as the program is.
KNOWN = ("banksman-zygote", "banksman-spare")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a module that is thorough as a whole: some of them import large libraries."""
    if IS_THOROUGH or config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8") if collection_path.is_file() else ""
    return True if re.search(r"^pytestmark = (pytest\.mark\.)?thorough$", text, re.MULTILINE) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, without skipping, what this run does not ask for: see thorough.py.

    First of all hooks: pytest's own chooses by `-m`, and must see that what Hypothesis makes up is explored.
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
    """Hear every signal: run in the background (nohup, a shell's &) we are started with some of them ignored, and so
    would be every program that a test starts and signals."""
    config.addinivalue_line("markers", "thorough: for `make prove` alone, see tests/thorough.py")
    config.addinivalue_line("markers", "explored: a part of it in `make test`, all of it in `make prove`")
    _use_memory()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _use_memory() -> None:
    """Keep the tests' files in memory, where there is room. A disk may stall for many seconds; then no NATS server
    answers, and leases are lost."""
    try:
        memory = os.statvfs(MEMORY)
    except OSError:
        return
    is_large = memory.f_bavail * memory.f_frsize >= MEMORY_BYTES_MIN
    if "TMPDIR" not in os.environ and is_large and not memory.f_flag & os.ST_NOEXEC and os.access(MEMORY, os.W_OK):
        os.environ["TMPDIR"] = tempfile.tempdir = MEMORY
    # Node would leave its compiled modules there.
    os.environ["NODE_DISABLE_COMPILE_CACHE"] = "1"


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
    """No process, fd or thread more than before, but for the zygote, which is known by name, and what tests share:
    nodes of NATS, which are known by their keeper, and servers with all that they have started."""
    spawner.current(attributes.take_inherited().fingerprint)  # Warm, so that its start is not taken for a leak.
    fds, threads = _fds(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while (left := _processes()) and time.monotonic() < deadline:
        time.sleep(0.01)  # There is no fact to wait for: these are nobody's children that we could wait on.
    assert not left, f"processes left behind: {left}"
    # A thread that waited for one of them may need a moment more.
    while (more_threads := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not more_threads, f"threads left behind: {more_threads}"
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
        # The lock on spill files is held as long as a result refers to one: see commands/output.py.
        if int(name) not in known and not target.removesuffix(" (deleted)").endswith(".owner"):
            found.add(f"{name}: {target}")
    return found


# Processes that were not ours when they were last looked at. They never become ours, and no test uses up so many pids
# that one of them comes back as another process; so they are not read again after each of thousands of tests.
_foreign: set[str] = set()


def _processes() -> list[str]:
    """Our descendants, but for zygotes: a keeper counts, for it means that something is still kept."""
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
            _foreign.add(str(pid))  # Not one whose parent went away while we looked: it may be ours.
        elif ancestor == os.getpid() and pid != os.getpid() and not names[pid].startswith(KNOWN):
            mine.append(f"{pid} {names[pid]}")
    return mine
