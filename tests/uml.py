"""Run a program in a Linux kernel of its own: User-Mode Linux, an ordinary process that needs no rights.

This machine may lack what a test needs from its kernel, such as the controllers of cgroup v2. The kernel is Debian's
package `user-mode-linux`. It sees the files of this machine, and cannot write them. It has its own swap. Its first
process can be systemd, which starts nothing but the program.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.process.helpers import REPOSITORY

from banksman import execute

PROGRAM = "linux.uml"
MEMORY = "1024M"
SWAP_BYTES = 256 << 20
# For the kernel's own files. It mounts something else over /dev, where a temporary folder can be.
PLACE = "/var/tmp"
# The first process of the kernel. It refuses to be anything else: its mounts would change this machine.
INIT = """#!/bin/sh
[ $$ = 1 ] || exit 1
mount -t proc proc /proc && grep -q 'User Mode Linux' /proc/cpuinfo || exit 1
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t cgroup2 none /sys/fs/cgroup
mkswap /dev/ubda && swapon /dev/ubda
mkdir -p /run/systemd/system && cp {unit} /run/systemd/system
exec {first}
"""
# The program. It ends the kernel.
JOB = """
exec > /dev/console 2>&1
{enter}
cd {cwd}
export HOME=/tmp PATH={path} PYTHONPATH={pythonpath} PYTHONDONTWRITEBYTECODE=1
{command}
status=$?
echo
echo "EXIT $status"
echo o > /proc/sysrq-trigger
sleep 10
"""
# The program as a service of systemd with a group of its own, in which it lives one level deeper: docs/agents.md.
UNIT = """
[Unit]
DefaultDependencies=no
AllowIsolate=yes
[Service]
Type=oneshot
Delegate=cpu memory pids
ExecStart=/bin/sh {job}
"""
# The signal (SIGRTMIN+21) has systemd write no status to the console.
ENTER = """
kill -55 1
group=/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)
mkdir $group/banksman-host && echo $$ > $group/banksman-host/cgroup.procs
"""
# The program by which an installed systemd is known.
SYSTEMD = "systemd-run"
BOOT = "/lib/systemd/systemd --unit=job.service --log-target=null"


def why_not(*programs: str) -> str:
    """Return why there is no such kernel, or not these programs; empty if all are there.

    Fails where a test may not be skipped.
    """
    missing = [program for program in (PROGRAM, *programs) if shutil.which(program) is None]
    if not missing:
        return ""
    why = f"NOT TESTED: {missing[0]} is not installed (Debian: python3 tools/debian.py {missing[0]})"
    if "CI" in os.environ:
        pytest.fail(why)
    return why


def run(argv: Sequence[str], seconds_max: float, *, is_service: bool = False) -> list[str]:
    """Run a program in a new kernel and return the lines that it prints.

    `is_service`: systemd is the first process, and the program is its service.
    """
    with tempfile.TemporaryDirectory(prefix="uml-", dir=PLACE) as folder:
        return _run(argv, Path(folder), seconds_max, is_service=is_service)


def _run(argv: Sequence[str], folder: Path, seconds_max: float, *, is_service: bool) -> list[str]:
    init, job, unit, swap = (folder / name for name in ("init", "job", "job.service", "swap"))
    source = REPOSITORY / "src"
    paths = {"cwd": REPOSITORY, "path": os.environ["PATH"], "pythonpath": f"{source}:{REPOSITORY}"}
    quoted = {name: shlex.quote(str(value)) for name, value in paths.items()}
    job.write_text(JOB.format(enter=ENTER if is_service else "", command=shlex.join(argv), **quoted))
    unit.write_text(UNIT.format(job=job))
    init.write_text(INIT.format(unit=unit, first=BOOT if is_service else f"sh {job}"))
    init.chmod(0o755)
    swap.touch()
    os.truncate(swap, SWAP_BYTES)
    kernel = [PROGRAM, f"mem={MEMORY}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={init}"]
    console = ["con=null", "con0=null,fd:1", "quiet", "panic=-1", f"uml_dir={folder}/", "umid=kernel"]
    done = asyncio.run(
        execute(
            [*kernel, *console, f"ubd0={swap}"],
            cwd=folder,
            env={"TMPDIR": str(folder)},
            timeout=seconds_max,
            grace=0.5,
        )
    )
    lines = done.stdout.text.replace("\r", "").splitlines()
    assert "EXIT 0" in lines, done.stdout.text[-3000:] + done.stderr.text[-1000:]
    return lines
