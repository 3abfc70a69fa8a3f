"""Installs the real agent that the tests drive, and runs a command where that agent can reach nobody.

    python3 tools/agents.py install                  fetch it into .agents, if it is not there
    python3 tools/agents.py run COMMAND [WORDS …]    the same, then COMMAND in a network namespace with loopback alone

**Installing.** npm fetches one package, pinned by version and by hash, and runs none of its scripts. Which registry, is
what npm is configured to; no address is written here, and the hash holds whichever it is. It is done once, and again
when the pin changes.

**Running.** An agent under test talks to a model that a test plays on 127.0.0.1, and to nobody else: not by care, but
because there is nobody else. `unshare -n` (`-rn` if not root) starts this file again, in a network namespace of its
own; there `lo` is raised, every other interface is seen to be down, and the command takes over. It finds the agents by
`BANKSMAN_AGENTS`. Where namespaces are not allowed, nothing is run: by hand that is said and is no failure, in CI it is
one.

Only the standard library.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".agents"

VERSION = "2.1.325"
# By the machine's name as the kernel has it: the package that holds the program for it, and the hash of its archive.
PACKAGES = {
    "x86_64": (
        "@anthropic-ai/claude-code-linux-x64",
        "sha512-BqZzMvP/zgLLL34S+7OzbG+cyoFp7gwWHU5koVwsyMlTAz+0zZAmbY+UkzvtN2RXxp6AcMenbYIjQJxoXfUY3w==",
    ),
    "aarch64": (
        "@anthropic-ai/claude-code-linux-arm64",
        "sha512-NCvQcOxr685Y4mkYUjQT8l/Ouzw0k2xWloWeyzfsUtWiOedHosPkaW6XCSpzAl1dMuvDNBF97qpWgVDrSdK2Vw==",
    ),
}
# 170 MB to fetch and 350 MB to unpack: slow lines are met, hanging ones end.
INSTALL_SECONDS_MAX = 1200.0
PROBE_SECONDS_MAX = 60.0

# Of <linux/sockios.h> and <linux/if.h>. By ioctl and not by `ip`, which small machines do not have.
SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1
IFREQ = struct.Struct("16sH22x")


def loudly(*lines: str) -> None:
    print("", "!" * 100, *(f"!! {line}" for line in lines), "!" * 100, "", sep="\n", file=sys.stderr, flush=True)


def fail(*lines: str) -> NoReturn:
    loudly(*lines)
    sys.exit(1)


# -- installing ------------------------------------------------------------------------------------------------------
def package() -> tuple[str, str]:
    """The name and the hash of what this machine can run."""
    found = PACKAGES.get(platform.machine())
    if sys.platform != "linux" or found is None or platform.libc_ver()[0] != "glibc":
        fail(
            f"No agent is pinned for this machine: {sys.platform}, {platform.machine()}, {platform.libc_ver()[0]}.",
            "Whoever wants to test here: add its package and its hash to PACKAGES in tools/agents.py.",
        )
    return found


def install() -> None:
    """Afterwards .agents holds the pinned agent. If it already does, nothing is done and nothing is fetched."""
    name, integrity = package()
    # npm checks what it fetches against the hash of a lock, and takes a lock without addresses. So a lock it is.
    lock = {
        "name": "agents",
        "lockfileVersion": 3,
        "requires": True,
        "packages": {
            "": {"name": "agents", "dependencies": {name: VERSION}},
            f"node_modules/{name}": {"version": VERSION, "integrity": integrity},
        },
    }
    wanted = json.dumps(lock, indent=2)
    stamp = FOLDER / ".stamp.json"
    with open(__file__, "rb") as held:
        # Two runs of make at once must not install into one folder together. This file is there already: nothing new
        # to ignore or to clean.
        fcntl.flock(held, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        print(f"installing {name} {VERSION} into {FOLDER.name}, without its scripts", flush=True)
        stamp.unlink(missing_ok=True)
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / "package.json").write_text(json.dumps({"name": "agents", "dependencies": {name: VERSION}}))
        (FOLDER / "package-lock.json").write_text(wanted)
        fetch()
        program = FOLDER / "node_modules" / name / "claude"
        if not os.access(program, os.X_OK):
            fail(
                f"{name} {VERSION} was installed, and has no program {program.name} in it.",
                "The pin must be looked at.",
            )
        # The tests need not know what the package is called. A link that is relative, so that a checkout can be moved.
        link = FOLDER / "claude"
        link.unlink(missing_ok=True)
        link.symlink_to(program.relative_to(FOLDER))
        # Last: an install that was cut short leaves no stamp, and the next run starts again.
        stamp.write_text(wanted)


def fetch() -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        fail(
            "npm is not on PATH, and the real agent comes from its registry.",
            "Whoever runs this machine: install Node.js 18 or newer, which brings npm. Only the installing needs it.",
        )
    # `ci` and not `install`: what the lock does not say is an error, and the lock is not rewritten.
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
    try:
        done = subprocess.run(
            command, cwd=FOLDER, stdin=subprocess.DEVNULL, check=False, timeout=INSTALL_SECONDS_MAX
        ).returncode
    except subprocess.TimeoutExpired:
        done = None
    if done != 0:
        how = f"ended with {done}" if done is not None else f"did not end within {INSTALL_SECONDS_MAX:.0f} s"
        fail(
            f"The agent could not be installed: npm ci {how}; what it said is above.",
            "No network, or another registry is meant: whoever runs this machine, see `npm config get registry`.",
            "EINTEGRITY: what the registry has is not what was pinned. Trust nothing of it; find out why.",
            "Where it was installed once, no network is needed any more.",
        )


# -- running ---------------------------------------------------------------------------------------------------------
def again(*words: str) -> list[str]:
    """The words that start this file again, in a network namespace of its own."""
    # A user who is not root gets a user namespace too, for in there it may make the other one.
    flags = "-n" if os.geteuid() == 0 else "-rn"
    return ["unshare", flags, sys.executable, str(Path(__file__).resolve()), "alone", *words]


def why_not_alone() -> str | None:
    """Why there can be no namespace, or None. Tried to the end: it may be allowed to make one and not to raise `lo`."""
    try:
        probe = subprocess.run(
            again(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_SECONDS_MAX,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return str(exc)
    return None if probe.returncode == 0 else (probe.stderr or probe.stdout).strip()[-500:] or "unshare said nothing"


def run(command: Sequence[str]) -> NoReturn:
    why = why_not_alone()
    if why is not None:
        is_ci = "CI" in os.environ
        loudly(
            "THE TESTS WITH A REAL AGENT WERE NOT RUN.",
            "They start it in a network namespace that holds only loopback, and there can be none here:",
            *(f"    {line}" for line in why.splitlines()),
            "Whoever runs this machine: be root in it (in a container: with SYS_ADMIN), or allow user namespaces",
            "(kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), and have unshare.",
            "In CI this is a failure." if is_ci else "By hand this is no failure; in CI it would be one.",
        )
        sys.exit(1 if is_ci else 0)
    install()
    os.environ["BANKSMAN_AGENTS"] = str(FOLDER)
    words = again(*command)
    os.execvp(words[0], words)


def alone(command: Sequence[str]) -> None:
    """Inside: raise `lo`, be sure that there is no other way out, and become the command."""
    raise_loopback()
    others = sorted(interfaces_up() - {"lo"})
    assert not others, f"a way out of the network namespace: {others}"
    if command:
        os.execvp(command[0], list(command))


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = IFREQ.unpack(fcntl.ioctl(any_socket, SIOCGIFFLAGS, IFREQ.pack(b"lo", 0)))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, IFREQ.pack(b"lo", flags | IFF_UP))


def interfaces_up() -> set[str]:
    """The interfaces that something can be sent through.

    Not all that are there: some kernels put their tunnels' fallback devices (sit0, tunl0) into every new namespace.
    Those are down, and lead nowhere.
    """
    found: set[str] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            _, flags = IFREQ.unpack(fcntl.ioctl(any_socket, SIOCGIFFLAGS, IFREQ.pack(name.encode(), 0)))
            if flags & IFF_UP:
                found.add(name)
    return found


def main() -> None:
    match sys.argv[1:]:
        case ["install"]:
            install()
        case ["run", first, *rest]:
            run([first, *rest])
        case ["alone", *command]:
            alone(command)
        case _:
            sys.exit("usage: agents.py install | run COMMAND [WORDS …]")


if __name__ == "__main__":
    main()
