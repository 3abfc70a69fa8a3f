"""`banksman doctor` reports each fault with a fix, changes nothing by looking, and sweeps the remains of dead hosts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import SECONDS_MAX, Served

from banksman import sockets
from banksman.cli.doctor import leftovers
from banksman.process import cgroups
from banksman.store.sqlite import store_health

pytestmark = pytest.mark.thorough

HANGS = {"prompt": ["hang"]}
ALONE = Path(__file__).with_name("doctor_alone.py")


class Machine:
    """A user with separate folders, on a machine that runs only this user's hosts.

    `run`: runs `banksman doctor`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The pids of its hosts, including dead ones.
        self.hosts: set[int] = set()
        self.state = folder / "state" / "banksman"
        self.config = folder / "config" / "banksman" / "config.toml"
        self.temporary = folder / "temporary"
        for made in (self.state, self.config.parent, self.temporary):
            made.mkdir(parents=True, mode=0o700)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BANKSMAN_")}
        self.env = {
            **clean,
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "TMPDIR": str(self.temporary),
        }

    def run(self, *words: str, under: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*under, sys.executable, str(ALONE), ",".join(map(str, self.hosts)), *words],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            env={**self.env, **env},
        )

    def look(self, *words: str, under: tuple[str, ...] = (), **env: str) -> Any:
        done = self.run("--json", *words, under=under, **env)
        assert done.stdout, done.stderr
        found = json.loads(done.stdout)
        is_wrong = any(each["verdict"] == "wrong" for each in found["checks"])
        assert done.returncode == (0 if found["well"] else 1), done.stderr
        assert found["well"] or is_wrong or not all(each["done"] for each in found["swept"])
        return found

    def of(self, name: str, *words: str, under: tuple[str, ...] = (), **env: str) -> list[tuple[str, str, str | None]]:
        """Return verdict, finding and fix of every check of this name."""
        checks = self.look(*words, under=under, **env)["checks"]
        found = [(each["verdict"], each["seen"], each["fix"]) for each in checks if each["name"] == name]
        assert found, [each["name"] for each in checks]
        return found

    def files(self) -> dict[str, tuple[int, str]]:
        """Return every file of the user, with its mode and a hash of its contents."""
        found: dict[str, tuple[int, str]] = {}
        for path in sorted(self.folder.rglob("*")):
            mode = path.lstat().st_mode
            content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(mode) else ""
            found[str(path.relative_to(self.folder))] = (mode, content)
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "user")


@contextlib.contextmanager
def serving(machine: Machine) -> Generator[Served]:
    """Serve with a store where `doctor` looks for it."""
    served = Served(machine.folder, store=f"sqlite:{machine.state / 'store.db'}")
    with served:
        machine.hosts.add(served.pid)
        yield served


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(*pids: int) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.01)


# -- a healthy machine -----------------------------------------------------------------------------------------------
def test_doctor_on_a_new_machine_finds_nothing_and_makes_nothing(machine: Machine) -> None:
    before = machine.files()
    done = machine.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\nnothing is wrong\n")
    assert "  ok     trial: a command, and the process that it left running, were ended in " in done.stdout
    assert "\x1b" not in done.stdout, "no colour where nobody sees it"
    assert machine.run("--format", "quiet").stdout == ""
    assert machine.files() == before


def test_doctor_reports_a_state_folder_that_cannot_be_made(machine: Machine) -> None:
    """Not even root can write there."""
    [(verdict, seen, fix)] = machine.of("state folder", XDG_STATE_HOME="/proc/1/nothing")
    assert verdict == "wrong"
    assert "cannot create" in seen
    assert "XDG_STATE_HOME" in (fix or "")


def test_doctor_finds_a_running_server_without_disturbing_it(machine: Machine) -> None:
    with serving(machine) as served:
        session = served.open()
        served.outcome(session, served.ask(session, "hello"))
        before = machine.files()
        checks = machine.look()["checks"]
        assert machine.files() == before
        seen = {each["name"]: each for each in checks}
        assert seen["server"]["verdict"] == "ok"
        assert f"process {served.pid}, version" in seen["server"]["seen"]
        assert seen["store"]["verdict"] == "ok"
        assert "1 sessions, " in seen["store"]["seen"]
        assert f"in use by process {served.pid}" in seen["store"]["seen"]
        assert seen["leftovers"]["seen"] == "none"
        # The server still serves.
        served.outcome(session, served.ask(session, "hello"))


# -- faults ----------------------------------------------------------------------------------------------------------
def test_doctor_reports_files_that_others_may_read_or_change(machine: Machine) -> None:
    token = machine.state / "token"
    token.write_text("a-token-of-the-tests\n")
    token.chmod(0o644)
    ((verdict, seen, fix),) = machine.of("token")
    assert (verdict, fix) == (
        "wrong",
        f"rm {token}: the token may have been read, and the next server creates another",
    )
    assert "mode 644" in seen
    token.chmod(0o600)
    assert machine.of("token")[0][0] == "ok"
    machine.state.chmod(0o777)
    assert machine.of("state folder")[0] == (
        "wrong",
        f"other users can change {machine.state} (mode 777)",
        f"chmod go-w {machine.state}",
    )


def test_doctor_reports_wrong_settings_and_checks_the_rest(machine: Machine) -> None:
    machine.config.write_text("[serve]\nprot = 1\n")
    checks = machine.look()["checks"]
    ((verdict, seen, fix),) = [(c["verdict"], c["seen"], c["fix"]) for c in checks if c["name"] == "settings"]
    assert (verdict, fix) == ("wrong", "did you mean 'port'?")
    assert seen == f"{machine.config}, line 2: unknown key 'serve.prot'"
    assert {each["group"] for each in checks} == {"machine", "settings", "places", "stores", "reach", "leftovers"}
    machine.config.write_text('[serve]\nbind = "0.0.0.0"\n')
    assert machine.of("server settings")[0][0] == "wrong"
    machine.config.write_text('[serve]\ntoken = "hunter2hunter2"\n')
    machine.config.chmod(0o644)
    found = machine.look()
    assert "hunter2" not in json.dumps(found)
    assert machine.of("settings file") == [
        ("wrong", f"other users can read serve.token in {machine.config}", f"chmod 600 {machine.config}")
    ]
    assert machine.of("variables", BANKSMAN_STROE="x") == [
        ("note", "unknown variable BANKSMAN_STROE", "did you mean BANKSMAN_STORE?")
    ]


def test_doctor_reports_a_named_server_that_is_not_there(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ((verdict, seen, fix),) = machine.of("server", BANKSMAN_URL=f"http://127.0.0.1:{port}/#token=hunter2hunter2")
    assert verdict == "wrong"
    assert seen == f"no server answers at http://127.0.0.1:{port}, which BANKSMAN_URL names"
    assert fix == "start the server, or remove the url from BANKSMAN_URL"
    with serving(machine) as served:
        ((verdict, _, fix),) = machine.of("server", BANKSMAN_URL=served.url, BANKSMAN_TOKEN="not-the-token")
        assert verdict == "wrong"
        assert "BANKSMAN_TOKEN" in (fix or "")


def test_doctor_reports_too_few_fds(machine: Machine) -> None:
    ((verdict, seen, _),) = machine.of("fd limit", under=("prlimit", "--nofile=500:500", "--"))
    assert (verdict, seen) == ("wrong", "soft limit 500, hard limit 500")


def test_doctor_says_whether_a_tree_can_be_limited(machine: Machine) -> None:
    ((verdict, seen, fix),) = machine.of("control groups")
    why = cgroups.why_not() or cgroups.why_not(())
    if why is None and cgroups.is_undelegated(cgroups.base_folder()):
        assert verdict == "note"
        assert "belongs to systemd" in seen
    elif why is None:
        assert verdict == "ok"
        assert cgroups.base_folder() in seen
    else:
        assert verdict == "note"
        assert seen.startswith((why[0], f"none: {why[0]}"))
        assert "refused" in seen
        assert fix == why[1]


def test_doctor_reports_a_malformed_profile(machine: Machine) -> None:
    folder = machine.config.parent / "agents"
    folder.mkdir()
    (folder / "mine.toml").write_text("comand = ['x']\n")
    verdict, seen, fix = machine.of("agents")[0]
    assert verdict == "wrong"
    assert "comand" in seen
    assert str(folder / "mine.toml") in (fix or "")


# -- the store -------------------------------------------------------------------------------------------------------
def with_history(machine: Machine) -> Path:
    """Return a store that was closed in order."""
    with serving(machine) as served:
        session = served.open(name="fix-ci")
        for _ in range(3):
            served.outcome(session, served.ask(session, "x" * 20_000))
    return machine.state / "store.db"


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        ("DELETE FROM chunks WHERE id = (SELECT max(id) FROM chunks)", "are missing"),
        ("UPDATE chunks SET crc = crc + 1 WHERE first = 1", "checksum is wrong"),
        ("INSERT OR REPLACE INTO snapshots SELECT id, seq, 0, x'00' FROM sessions", "snapshot"),
        ("UPDATE sessions SET seq = seq - 3", "the session's row ends at"),
    ],
)
def test_doctor_reports_a_damaged_session_and_changes_nothing(machine: Machine, harm: str, told: str) -> None:
    with serving(machine) as served:
        session = served.open()
        served.outcome(session, served.ask(session, "hello"))
    with contextlib.closing(sqlite3.connect(machine.state / "store.db")) as connection:
        connection.execute(harm)
        connection.commit()
    before = machine.files()
    [(verdict, seen, fix)] = machine.of("session")
    assert verdict == "wrong"
    assert session in seen
    assert told in seen
    assert "restore a backup" in (fix or "")
    assert machine.files() == before


@pytest.mark.parametrize("is_all", [True, False], ids=["every page", "one page"])
def test_doctor_reports_a_damaged_store_and_changes_nothing(machine: Machine, is_all: bool) -> None:
    path = with_history(machine)
    assert machine.of("store")[0][0] == "ok"
    with contextlib.closing(sqlite3.connect(path)) as store:
        ((root,),) = store.execute("SELECT rootpage FROM sqlite_master WHERE name = 'chunks_by_session'").fetchall()
    data = bytearray(path.read_bytes())
    page_bytes = int.from_bytes(data[16:18], "big")
    # A plain look does not read the torn page. Only a check of all pages finds it.
    for page in range(3, len(data) // page_bytes) if is_all else (root,):
        data[(page - 1) * page_bytes : (page - 1) * page_bytes + 64] = b"\xff" * 64
    path.write_bytes(data)
    before = machine.files()
    ((verdict, seen, fix),) = machine.of("store")
    assert verdict == "wrong"
    assert str(path) in seen
    assert "backup" in (fix or "")
    assert machine.files() == before


def test_doctor_reports_a_store_of_another_program_or_newer_banksman(machine: Machine) -> None:
    path = machine.state / "store.db"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE mine (x)")
    path.chmod(0o600)
    ((verdict, seen, fix),) = machine.of("store")
    assert (verdict, seen, fix) == (
        "wrong",
        f"{path} is a database of another program",
        "take another path for the store",
    )
    path.unlink()
    with_history(machine)
    with contextlib.closing(sqlite3.connect(path)) as newer:
        newer.execute("PRAGMA user_version = 999")
    verdict, seen, _ = machine.of("store")[0]
    assert verdict == "wrong"
    assert "newer Banksman (schema 999" in seen


def test_doctor_says_what_is_wrong_with_the_name_of_a_store(machine: Machine) -> None:
    expected = ("wrong", "cannot use the store '/abs/x.db': it has no scheme", "pass sqlite:/abs/x.db")
    assert machine.of("store", "--store", "/abs/x.db") == [expected]


def test_doctor_checks_the_configured_store(machine: Machine) -> None:
    elsewhere = machine.folder / "elsewhere.db"
    machine.config.write_text(f'store = "sqlite:{elsewhere}?level=full&keep_bytes=1000"\n')
    assert machine.of("store") == [("ok", f"{elsewhere} (does not exist yet)", None)]
    machine.config.write_text(f'store = "memory:"\n[serve]\nstore = "sqlite:{elsewhere}"\n')
    assert machine.of("store") == [("ok", f"{elsewhere} (does not exist yet)", None)]


# -- remains of dead hosts -------------------------------------------------------------------------------------------
def test_doctor_sweep_removes_what_a_killed_server_left(machine: Machine) -> None:
    with serving(machine) as served:
        session = served.open(HANGS, name="fix-ci")
        turn = served.ask(session, "work")
        wait_started(served, session, turn)
        tree = [each["pid"] for each in served.get(f"/v1/sessions/{session}/why")["tree"]]
        served.kill()
    # The keeper ends the tree. The session stays open in the store.
    wait_gone(*tree)
    before = machine.files()
    assert (machine.state / "server.json").exists()
    found = machine.look()
    assert machine.files() == before, "looking changes nothing, the write-ahead log's index included"
    left = [each["seen"] for each in found["checks"] if each["name"] == "leftovers"]
    assert any("1 sessions of dead hosts are not settled: fix-ci" in seen for seen in left), left
    assert any("server.json names a dead server" in seen for seen in left), left
    assert any("sockets in" in seen for seen in left), left
    assert found["well"], "these go by themselves with the next server"
    # On request.
    swept = [each["what"] for each in machine.look("--sweep")["swept"]]
    assert "settled session fix-ci" in swept
    assert f"removed {machine.state / 'server.json'}" in swept
    assert machine.of("leftovers") == [("ok", "none", None)]
    assert not (machine.state / "server.json").exists()
    assert [name for name in os.listdir(machine.state / "sockets") if name.endswith(sockets.SUFFIX)] == []
    # A second sweep has nothing to do.
    assert machine.look("--sweep")["swept"] == []


def test_doctor_sweep_ends_a_process_whose_host_and_keeper_were_killed(machine: Machine) -> None:
    with serving(machine) as served:
        session = served.open(HANGS, name="fix-ci")
        turn = served.ask(session, "work")
        wait_started(served, session, turn)
        store = machine.state / "store.db"
        keepers = keepers_of(served.pid)
        assert keepers
        # No guard is left to end the tree: the limit of G6. The host is stopped first, or it would replace them.
        tree = [each["pid"] for each in served.get(f"/v1/sessions/{session}/why")["tree"]]
        for pid in (served.pid, *keepers):
            os.kill(pid, signal.SIGSTOP)
        for pid in (*keepers, served.pid):
            os.kill(pid, signal.SIGKILL)
        served.kill()
        wait_gone(*keepers)
    agent = next(pid for pid in tree if is_alive(pid))
    try:
        found = store_health.look(store)
        assert found is not None
        assert [each.name for each in found.left] == ["fix-ci"]
        ((verdict, seen, fix),) = [each for each in machine.of("leftovers") if each[0] == "wrong"]
        assert (verdict, fix) == ("wrong", "banksman doctor --sweep")
        assert f"{agent} (" in seen
        assert is_alive(agent), "looking ends nothing"
        done = machine.run("--sweep")
        assert done.returncode == 0, done.stdout
        assert f"settled session fix-ci, ended process {agent} (" in done.stdout
        wait_gone(*tree)
    finally:
        for pid in tree:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_doctor_sweep_leaves_a_session_of_a_live_host_alone(machine: Machine) -> None:
    with serving(machine) as served:
        session = served.open(HANGS)
        turn = served.ask(session, "work")
        wait_started(served, session, turn)
        assert machine.look("--sweep")["swept"] == []
        assert served.get(f"/v1/sessions/{session}")["holder"] == turn


def test_doctor_sweep_removes_only_orphaned_output_files(machine: Machine) -> None:
    def file(name: str, *, hours: float, mode: int = 0o600) -> Path:
        path = machine.temporary / name
        path.write_text("output")
        path.chmod(mode)
        then = time.time() - hours * 3600
        os.utime(path, (then, then))
        return path

    old = file("banksman-abcd_123.out", hours=48)
    kept = [
        file("banksman-efgh5678.out", hours=1),  # A reader may still use it.
        file("banksman-notes.out", hours=48),  # It belongs to the user.
        file("banksman-ijkl9012.out", hours=48, mode=0o644),
        file("other-abcd1234.out", hours=48),
    ]
    link = machine.temporary / "banksman-link1234.out"
    link.symlink_to(kept[1])
    ((verdict, seen, fix),) = machine.of("leftovers")
    assert (verdict, fix) == ("note", "banksman doctor --sweep")
    assert seen.startswith("1 output files of commands")
    assert machine.look("--sweep")["swept"] == [{"done": True, "what": f"removed {old}"}]
    assert not old.exists()
    assert all(path.exists() for path in (*kept, link))


SPILLS = """
import asyncio, os, signal, banksman
async def main():
    done = await banksman.execute(["printf", "%01000d", "0"], output_bytes_max=10)
    print(done.stdout.file, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_doctor_sweep_removes_the_spill_file_of_a_killed_process(machine: Machine) -> None:
    env = {**os.environ, "TMPDIR": str(machine.temporary)}
    killed = subprocess.run([sys.executable, "-c", SPILLS], env=env, capture_output=True, text=True, check=False)
    left = Path(killed.stdout.strip())
    assert (killed.returncode, left.exists()) == (-signal.SIGKILL, True), killed.stderr
    ((verdict, seen, fix),) = machine.of("leftovers")
    assert (verdict, seen.startswith("1 output files of commands"), "killed" in seen) == ("note", True, True)
    assert fix is not None
    assert left.exists(), "looking removes nothing"
    owner = left.with_name(left.name.rpartition("-")[0] + ".owner")
    swept = [{"done": True, "what": f"removed {path}"} for path in (left, owner)]
    assert machine.look("--sweep")["swept"] == swept
    assert machine.of("leftovers") == [("ok", "none", None)]
    assert (left.exists(), owner.exists()) == (False, False)


def dead_pid() -> int:
    """Return the pid of a process that has exited."""
    with subprocess.Popen(["true"]) as process:
        process.wait(SECONDS_MAX)
    return process.pid


@pytest.mark.parametrize("socket_name", ["0badb007-1-00000000.sock", None], ids=["another boot", "no socket"])
def test_doctor_sweep_keeps_a_discovery_file_of_another_machine(machine: Machine, socket_name: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    said: dict[str, Any] = {"url": f"http://127.0.0.1:{port}", "pid": dead_pid(), "started": 1.0}
    if socket_name is not None:
        said["socket"] = str(machine.state / "sockets" / socket_name)
    path = machine.state / "server.json"
    path.write_text(json.dumps(said))
    ((verdict, seen, fix),) = machine.of("leftovers")
    assert verdict == "note"
    assert seen == f"{path} names a server that does not answer, or is on another machine"
    assert fix == "the next server replaces it; or remove it, if no other machine uses this folder"
    assert machine.look("--sweep")["swept"] == []
    assert path.exists()


def test_doctor_sweep_continues_past_an_unreadable_folder(machine: Machine) -> None:
    (machine.state / "sockets").symlink_to("sockets")
    old = machine.temporary / "banksman-abcd_123.out"
    old.write_text("output")
    old.chmod(0o600)
    os.utime(old, (1.0, 1.0))
    found = machine.look("--sweep")
    assert found["swept"] == [{"done": True, "what": f"removed {old}"}]
    ((seen, fix),) = [(c["seen"], c["fix"]) for c in found["checks"] if c["name"] == "leftovers"]
    assert "symbolic links" in seen
    assert fix
    # Without a folder for state, the report says so, as without the flag.
    assert "leftovers" in [c["name"] for c in machine.look("--sweep", HOME="/", XDG_STATE_HOME="")["checks"]]


def test_unlinked_continues_past_missing_and_failing_files(tmp_path: Path) -> None:
    stays, old = tmp_path / "a folder", tmp_path / "old"
    stays.mkdir()
    old.write_text("output")
    removing = leftovers.unlinked([str(tmp_path / "gone"), str(stays), str(old)])
    assert next(removing) == f"removed {old}"
    with pytest.raises(OSError, match="a folder"):
        next(removing)
    assert (stays.exists(), old.exists()) == (True, False)


def wait_started(served: Served, session: str, turn: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while (
        served.get(f"/v1/sessions/{session}")["holder"] != turn or not served.get(f"/v1/sessions/{session}/why")["tree"]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def keepers_of(host: int) -> list[int]:
    """Return the zygote, the spare keeper and the keepers of a process, by their command lines."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
                if len(words) > 5 and words[3].endswith(b"keeper/__main__.py") and words[5] == str(host).encode():
                    found.append(int(name))
    return found


def test_doctor_sees_keepers_of_other_hosts(machine: Machine, tmp_path: Path) -> None:
    """As other tests leave it for a moment: a stopped keeper whose host is dead."""
    with Served(tmp_path / "another") as other:
        other.outcome(session := other.open(), other.ask(session, "hello"))
        host, keepers = other.pid, keepers_of(other.pid)
        for pid in keepers:
            os.kill(pid, signal.SIGSTOP)
        try:
            other.kill()
            assert machine.of("leftovers") == [("ok", "none", None)]
            machine.hosts.add(host)
            found = machine.of("leftovers")
            assert {verdict for verdict, _, _ in found} == {"wrong"}
            assert {fix for _, _, fix in found} <= {f"kill -CONT {pid}" for pid in keepers}
        finally:
            for pid in keepers:
                # When continued, the zygote ends the others.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            wait_gone(*keepers)
