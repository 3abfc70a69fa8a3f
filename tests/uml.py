"""Run a program in a Linux kernel of its own: User-Mode Linux, an ordinary process that needs no rights.

This machine may lack what a test needs from its kernel, such as the controllers of cgroup v2. The kernel is Debian's
package `user-mode-linux`. It sees the files of this machine, and cannot write them. It has its own swap.
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
PATH=/usr/sbin:/sbin:$PATH; mkswap /dev/ubda && swapon /dev/ubda
cd {cwd}
export HOME=/tmp PATH={path} PYTHONPATH={pythonpath} PYTHONDONTWRITEBYTECODE=1
{command}
echo "EXIT $?"
echo o > /proc/sysrq-trigger
sleep 10
"""


def why_not() -> str:
    """Return why there is no such kernel; empty if there is one. Fails where a test may not be skipped."""
    if shutil.which(PROGRAM) is not None:
        return ""
    why = f"NOT TESTED: {PROGRAM} is not installed (Debian: apt-get install user-mode-linux)"
    if "CI" in os.environ:
        pytest.fail(why)
    return why


def run(argv: Sequence[str], seconds_max: float) -> list[str]:
    """Run a program in a new kernel and return the lines that it prints."""
    with tempfile.TemporaryDirectory(prefix="uml-", dir=PLACE) as folder:
        return _run(argv, Path(folder), seconds_max)


def _run(argv: Sequence[str], folder: Path, seconds_max: float) -> list[str]:
    init = folder / "init"
    source = REPOSITORY / "src"
    command = shlex.join(argv)
    paths = {"cwd": REPOSITORY, "path": os.environ["PATH"], "pythonpath": f"{source}:{REPOSITORY}"}
    quoted = {name: shlex.quote(str(value)) for name, value in paths.items()}
    init.write_text(INIT.format(command=command, **quoted))
    init.chmod(0o755)
    kernel = [PROGRAM, f"mem={MEMORY}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={init}"]
    swap = folder / "swap"
    swap.touch()
    os.truncate(swap, SWAP_BYTES)
    kernel.append(f"ubd0={swap}")
    console = ["con=null", "con0=null,fd:1", "quiet", "panic=-1", f"uml_dir={folder}/", "umid=kernel"]
    done = asyncio.run(
        execute([*kernel, *console], cwd=folder, env={"TMPDIR": str(folder)}, timeout=seconds_max, grace=0.5)
    )
    lines = done.stdout.text.replace("\r", "").splitlines()
    assert "EXIT 0" in lines, done.stdout.text[-3000:] + done.stderr.text[-1000:]
    return lines
