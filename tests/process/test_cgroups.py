"""Control groups: limits of whole trees, their usage, their kill, and the refusal where there are none.

A machine can have cgroup v2 without its controllers (they then belong to version 1), or cannot have it at all. So the
tests of the limits run here if that is possible, and else in a kernel of their own. Every other test has two ways: it
uses a group, or it expects the refusal.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests import uml
from tests.process.cgroup_scenes import SCENES, SESSIONS
from tests.process.helpers import REPOSITORY, alive, wait_until
from tests.thorough import thorough

from banksman import Command, Ended, Host, UsageError, execute
from banksman.process import attributes, cgroups
from banksman.process.keeper.cgroup import PREFIX, prune

SCENES_SECONDS_MAX = 240.0
# It starts four hosts, and each takes long in a kernel of its own.
NEXT_HOST = "agent_without_memory_at_the_next_host"
# Where cgroup v2 is mounted.
MOUNT = next(
    (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line), ""
)
LIMITS = {"memory_bytes": 1 << 26, "swap_bytes": 0, "processes": 20, "cpus": 0.5}


def refusal(limits: dict[str, Any]) -> str:
    """Return why this machine cannot set these limits; empty if it can."""
    try:
        cgroups.order(limits)
    except UsageError as exc:
        return str(exc)
    return ""


@contextmanager
def own_base() -> Generator[Path]:
    """Move this process into a group of its own, so that tests in other processes make their groups elsewhere."""
    before = Path(MOUNT + Path("/proc/self/cgroup").read_text().partition("0::")[2].splitlines()[0])
    base = Path(cgroups.base_folder(), f"test-{uuid.uuid4().hex}")
    inner = base / cgroups.HOST
    inner.mkdir(parents=True)
    try:
        (inner / "cgroup.procs").write_text("0")
        assert cgroups.base_folder() == str(base)
        yield base
    finally:
        # The zygote of this process is there too, if this was its first start.
        for pid in (inner / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (before / "cgroup.procs").write_text(pid)
        # Nothing of a failed test may stay.
        prune(str(base))
        wait_until(lambda: "populated 0" in (base / "cgroup.events").read_text(), "the end of its processes")
        inner.rmdir()
        base.rmdir()


@pytest.fixture
def base() -> Generator[Path]:
    """The folder of the groups. Where there can be none, the test has proven the refusal and is over."""
    why = cgroups.why_not(())
    if why is None:
        with own_base() as folder:
            yield folder
        return
    with pytest.raises(UsageError, match=r"cannot set the limits cgroup: ") as caught:
        asyncio.run(execute(["true"], limits={"cgroup": 1}))
    assert why[0] in str(caught.value)
    pytest.skip(f"NOT TESTED, but its refusal: {why[0]}")


def groups(base: Path) -> list[Path]:
    return list(base.glob(f"{PREFIX}*"))


# -- limits ----------------------------------------------------------------------------------------------------------
def seen_in(names: list[str]) -> dict[str, Any]:
    """Return what these scenes have seen, here or in a kernel of its own."""
    argv = [sys.executable, "tests/process/cgroup_scenes.py", *names]
    if not refusal(LIMITS):
        env = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
        pipe, seconds = subprocess.PIPE, SCENES_SECONDS_MAX
        with own_base():
            done = subprocess.run(argv, cwd=REPOSITORY, env=env, stdout=pipe, text=True, timeout=seconds, check=True)
        lines = done.stdout.splitlines()
    else:
        why = uml.why_not()
        if why:
            pytest.skip(why)
        lines = uml.run(argv, SCENES_SECONDS_MAX)
    seen = [json.loads(line.removeprefix("SCENE ")) for line in lines if line.startswith("SCENE ")]
    print(*(f"{each['scene']}: {each['seconds']} s: {each['seen']}" for each in seen), sep="\n")
    assert [each["scene"] for each in seen] == names
    return {each["scene"]: each["seen"] for each in seen}


@pytest.fixture(scope="module")
def scenes() -> dict[str, Any]:
    """What the scenes of one host have seen."""
    return seen_in([name for name in SCENES if name != NEXT_HOST])


@thorough
def test_command_over_its_memory_ends_with_out_of_memory(scenes: dict[str, Any]) -> None:
    seen = scenes["command_over_its_memory"]
    assert seen == {"ended": "out_of_memory", "signal": signal.SIGKILL, "stdout": "", "groups": []}


@thorough
def test_fork_is_refused_at_the_number_of_processes(scenes: dict[str, Any]) -> None:
    seen = scenes["command_at_its_number_of_processes"]
    assert seen["stdout"] == ""
    assert seen["refused"]
    assert 0 < seen["swept"] < 5


@thorough
def test_group_has_the_limits_and_measures_its_usage(scenes: dict[str, Any]) -> None:
    seen = scenes["files_of_a_group"]
    wanted = {"memory.max": "67108864", "memory.oom.group": "1", "pids.max": "7", "cpu.max": "50000 100000"}
    # A kernel without swap has no such file.
    assert seen["files"] in (wanted, {**wanted, "memory.swap.max": "0"})
    assert seen["shown"] == [67108864, 7, 0.5, 1]
    assert seen["measured"]
    assert not seen["left"]


@thorough
def test_session_without_memory_does_not_disturb_nine_others(scenes: dict[str, Any]) -> None:
    seen = scenes["one_of_ten_sessions_without_memory"]
    assert seen["first"] == ["done"] * SESSIONS
    lost = seen["lost"]
    assert (lost["kind"], lost["error"]) == ("failed", "out_of_memory")
    assert lost["text"] == "the agent ran out of memory; the agent exited (signal 9)"
    assert lost["exits"] == [{"process": 1, "code": None, "signal": signal.SIGKILL, "out_of_memory": True}]
    # The same processes have answered, and the session itself has got a new one.
    assert seen["after"] == ["done"] * (SESSIONS - 1)
    assert seen["same"]
    assert seen["again"] == "done"
    # The kernel of the test has swap and runs nothing else. This machine may have none, or swap for other programs.
    if refusal(LIMITS):
        assert seen["has_swap"]
        assert seen["swapped"] == 0
    assert seen["left"] == []


@thorough
def test_fork_bomb_in_one_session_delays_no_ask_of_another(scenes: dict[str, Any]) -> None:
    seen = scenes["fork_bomb_beside_asks"]
    # The order proves it: every ask was answered between the first refused fork and the end of the bomb.
    assert seen["still"]
    assert len(seen["before"]) == len(seen["during"]) == len(seen["after"])
    assert seen["processes"] == [40, 40]
    # The group of the other session.
    assert seen["left"] == 1


@thorough
def test_lack_of_memory_is_known_to_the_next_host() -> None:
    exited = {"process": 1, "code": None, "signal": signal.SIGKILL, "out_of_memory": True}
    lost = {"kind": "failed", "error": "out_of_memory", "exits": [exited], "taken": True, "adopted": 1, "left": []}
    assert seen_in([NEXT_HOST])[NEXT_HOST] == dict.fromkeys(("handed over", "crashed"), lost)


@thorough
def test_host_in_the_group_of_its_service_can_limit_one_level_deeper(scenes: dict[str, Any]) -> None:
    seen = scenes["place_of_a_service"]
    assert "cannot enable memory and pids and cpu in /sys/fs/cgroup/" in seen["."]
    assert "service: there are processes in it" in seen["."]
    assert "DelegateSubgroup=banksman-host" in seen["."]
    assert seen["banksman-host"].startswith("exited 0::/service/banksman-tree-")


# -- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("limit", LIMITS)
async def test_limit_is_set_or_refused_and_never_ignored(limit: str, tmp_path: Path) -> None:
    why = refusal({limit: LIMITS[limit]})
    if not why:
        done = await execute(["grep", "^0:", "/proc/self/cgroup"], limits={limit: LIMITS[limit]})
        assert PREFIX in done.stdout.text
        return
    assert f"cannot set the limits {limit}: " in why
    assert "`banksman doctor` shows the state" in why
    with pytest.raises(UsageError) as caught:
        await execute(["touch", "ran"], cwd=tmp_path, limits={limit: LIMITS[limit]})
    assert str(caught.value) == why
    async with Host("memory:") as host:
        with pytest.raises(UsageError) as caught:
            await host.open("claude", command=["touch", "ran"], cwd=tmp_path, limits={limit: LIMITS[limit]})
        assert str(caught.value) == why
        assert host.sessions() == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"memory_bytes": 0}, "pass a whole number from 1048576"),
        ({"memory_bytes": 1.5e9}, "pass a whole number"),
        ({"processes": True}, "pass a whole number from 1"),
        ({"cpus": 0}, "pass a number from 0.01"),
        ({"cpus": float("nan")}, "pass a number from 0.01"),
        ({"cgroup": 2}, "pass a whole number from 1 to 1"),
        ({"memory": 5}, "memory_bytes, swap_bytes, processes, cpus, cgroup"),
    ],
)
def test_wrong_limit_is_an_error_with_the_right_one(limits: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        attributes.parse_limits(limits)
    assert told in str(caught.value)


def test_group_is_refused_where_cgroup_v2_is_read_only_or_absent(base: Path) -> None:
    assert base.is_relative_to(MOUNT)
    code = """
import sys
from banksman.process import cgroups
print(cgroups.why_not(())[0])
"""
    seen: list[str] = []
    for change in (f"mount --bind {MOUNT} {MOUNT} && mount -o remount,bind,ro {MOUNT}", f"umount -l {MOUNT}"):
        script = f'{change} && exec {sys.executable} -c "$0"'
        argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, code]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode and "unshare" in done.stderr:
            pytest.skip(f"NOT TESTED: no mount namespace can be made here: {done.stderr}")
        seen.append(done.stdout.strip() or done.stderr)
    assert seen == [f"{base} is mounted read-only", "cgroup v2 is not mounted"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which alone may write everywhere")
def test_group_of_systemd_is_undelegated_unless_its_unit_says_so(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest unit decides: a manager of units does not delegate each of its units."""
    manager, unit = base / "user@0.service", base / "user@0.service" / "house.scope"
    inner = unit / "inner"
    inner.mkdir(parents=True)
    try:
        monkeypatch.setattr(cgroups, "_SYSTEMD", str(tmp_path / "none"))
        assert not cgroups.is_undelegated(str(inner))
        monkeypatch.setattr(cgroups, "_SYSTEMD", str(tmp_path))
        assert cgroups.is_undelegated(str(inner))
        os.setxattr(manager, "trusted.delegate", b"1")
        assert [cgroups.is_undelegated(str(each)) for each in (manager, inner)] == [False, True]
        os.setxattr(unit, "trusted.delegate", b"1")
        assert not cgroups.is_undelegated(str(inner))
        assert cgroups.is_undelegated(MOUNT)
    finally:
        for folder in (inner, unit, manager):
            folder.rmdir()


# -- life of a group -------------------------------------------------------------------------------------------------
def test_group_is_gone_when_the_end_is_known(base: Path, marker: str) -> None:
    async def main() -> None:
        script = "setsid sleep 1000 & grep ^0: /proc/self/cgroup"
        done = await execute(["sh", "-c", script, marker], limits={"cgroup": 1}, linger=0.05)
        path = done.stdout.text.strip().partition("::")[2]
        assert f"/{PREFIX}" in path
        assert not Path(MOUNT + path).exists()
        assert groups(base) == []
        assert [each.command for each in done.swept] == ["sleep 1000"]

    asyncio.run(main())


def test_failed_start_leaves_no_group(base: Path, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/nothing/here\n")
    script.chmod(0o755)

    async def main() -> None:
        with pytest.raises(Exception, match="cannot run the program"):
            await execute([str(script)], limits={"cgroup": 1})

    asyncio.run(main())
    assert groups(base) == []


# Starts a command as a keeper does. Prints the answer to the host.
KEEPER = """
import os, resource, socket, struct, sys
from banksman.process import syscalls
from banksman.process.keeper import messages, spare
base, how = sys.argv[1:]
ours, theirs = syscalls.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
null, cwd = os.open("/dev/null", os.O_RDWR), os.open("/", os.O_RDONLY)
order = {"path": b"/bin/true", "argv": (b"true",), "env": {}, "umask": 0o077, "limits": None, "nofile": 64,
         "targets": [null], "terminal": None, "user": None, "cgroup": (base, (), how == "late"), **messages.OWN_SESSION}
page = None
if how == "late":
    page = os.memfd_create("page")
    os.write(page, struct.pack("dd", 1e-9, 1e-9))
else:
    # One fd is left, for the folder of the group.
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    try:
        while True:
            last = os.dup(null)
    except OSError:
        os.close(last)
spare.supervise(order, theirs, cwd, [null], -1, (-1, -1), page=page)
print(messages.decode(ours.recv(100))[1:3])
"""


def keep(base: Path, how: str) -> str:
    argv = [sys.executable, "-c", KEEPER, str(base), how]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or done.stderr


def test_start_without_a_free_fd_leaves_no_group(base: Path) -> None:
    assert keep(base, "full") == f"('memory', {errno.EMFILE})"
    assert groups(base) == []


def test_groups_are_pruned_before_the_last_look_at_the_lease(base: Path) -> None:
    lost = base / f"{PREFIX}1-lost"
    lost.mkdir()
    assert keep(base, "late") == "('lease', 0)"
    assert groups(base) == []


def test_usage_is_that_of_the_inner_group_if_the_host_is_in_a_tree_itself(base: Path) -> None:
    outer = base / f"{PREFIX}1-outer"
    inner = outer / cgroups.HOST
    inner.mkdir(parents=True)
    code = """
import asyncio, os, sys
open(f"{sys.argv[1]}/cgroup.procs", "w").write("0")
from banksman import Host
from banksman.process import cgroups
async def main():
    assert cgroups.usage(os.getpid()) is None
    async with Host() as host:
        command = await host.start(["sleep", "50"], limits={"cgroup": 1}, grace=0.1)
        print(cgroups.usage(command.pid).path)
asyncio.run(main())
"""
    argv = [sys.executable, "-c", code, str(inner)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith(f"{outer}/{PREFIX}"), done.stderr
    wait_until(lambda: "populated 0" in (outer / "cgroup.events").read_text(), "the end of the host")
    inner.rmdir()
    outer.rmdir()


def test_kill_of_the_group_is_a_rung_and_names_what_it_ended(base: Path, marker: str) -> None:
    async def main() -> None:
        async with Host() as host:
            tool = "trap '' TERM; echo up; while :; do sleep 1; done"
            script = f'setsid sh -c "{tool}" {marker} & wait'
            command = await host.start(["sh", "-c", script, marker], limits={"cgroup": 1}, grace=0.1)
            assert isinstance(command, Command)
            assert await command.stdout.readline() == b"up\n"
            assert command.pid is not None
            usage = cgroups.usage(command.pid)
            assert usage is not None
            assert os.path.isdir(usage.path)
            done = await command.stop()
            assert [step.rung for step in done.ladder][-2:] == ["kill", "cgroup"]
            assert done.ended is Ended.STOPPED
            assert any(marker in each.command for each in done.swept)
            assert done.survivors == ()
            assert not os.path.exists(usage.path)

    asyncio.run(main())
    assert alive(marker) == []


HOST = """
import asyncio, os, sys
from banksman import Host
async def main():
    host = Host()
    command = await host.start(["sh", "-c", "sleep 1000 & sleep 1000", sys.argv[1]], limits={"cgroup": 1}, grace=0.1)
    keeper = command._running.keeper_pid if hasattr(command, "_running") else command.keeper_pid
    stat = open(f"/proc/{keeper}/stat").read()
    zygote = stat[stat.rindex(")") + 2:].split()[1]
    print(command.pid, keeper, zygote, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.fixture
def host(base: Path, marker: str) -> Generator[tuple[subprocess.Popen[str], list[int], Path]]:
    """A host in another process: the process, the pids of its command, keeper and zygote, and the group."""
    argv = [sys.executable, "-c", HOST, marker]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        usage = cgroups.usage(pids[0])
        assert usage is not None
        yield process, pids, Path(usage.path)
        process.kill()


def test_group_of_a_killed_host_is_removed_by_its_keeper(
    host: tuple[subprocess.Popen[str], list[int], Path], marker: str
) -> None:
    process, _pids, path = host
    process.kill()
    wait_until(lambda: not path.exists(), "the end of the group")
    assert alive(marker) == []


def test_next_start_ends_the_tree_that_has_lost_its_host_and_both_guards(
    host: tuple[subprocess.Popen[str], list[int], Path], marker: str
) -> None:
    process, (pid, keeper, zygote), path = host
    # The limit of G6: no process is left that could end the tree.
    for guard in (zygote, keeper):
        os.kill(guard, signal.SIGKILL)
    process.kill()
    wait_until(lambda: not os.path.exists(f"/proc/{keeper}"), "the end of the keeper")
    assert os.path.exists(f"/proc/{pid}")
    assert path.exists()
    cgroups.prune_again()
    assert asyncio.run(execute(["true"], limits={"cgroup": 1})).code == 0
    assert not path.exists()
    wait_until(lambda: not alive(marker), "the end of the tree")


def test_prune_spares_the_group_of_a_living_keeper(base: Path) -> None:
    async def main() -> None:
        async with Host() as host:
            command = await host.start(["sleep", "1000"], limits={"cgroup": 1})
            assert isinstance(command, Command)
            assert command.pid is not None
            usage = cgroups.usage(command.pid)
            assert usage is not None
            prune(str(base))
            cgroups.prune_again()
            await execute(["true"], limits={"cgroup": 1})
            assert os.path.isdir(usage.path)
            assert not command.is_over
            assert cgroups.usage(command.pid) is not None

    asyncio.run(main())


def test_groups_that_a_command_has_made_inside_its_own_are_removed(base: Path) -> None:
    # The command moves itself, as a container does.
    script = (
        'd=$0$(sed -n "s/^0:://p" /proc/self/cgroup); mkdir -p "$d/a/b" && echo $$ > "$d/a/b/cgroup.procs" && echo in'
    )

    async def main() -> None:
        done = await execute(["sh", "-c", script, MOUNT], limits={"cgroup": 1})
        assert done.stdout.text == "in\n", done.stderr.text

    asyncio.run(main())
    assert groups(base) == []
