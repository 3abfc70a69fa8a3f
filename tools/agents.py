"""Install the real agents that the tests use, and run a command in an isolated network namespace.

The ACP client `acpx` and the Node.js that it needs are installed like agents.

    python3 tools/agents.py install                  install missing agents and print their folder
    python3 tools/agents.py run COMMAND [WORDS …]    the same, then run COMMAND with loopback only

**Installing.** requirements/agents.json pins the packages of each agent by version and hash. npm
downloads them and runs none of their scripts. The configuration of npm decides the registry. This
file contains no URL, and the hash protects the content from any registry.

**Cache.** The agents take 1.5 GB. The cache is therefore outside the checkout, in
`$XDG_CACHE_HOME/banksman/agents` (or `~/.cache/…`), and a second checkout downloads nothing. Each
agent has a folder named after its pins, so another version has another folder. The script creates
the folder under a temporary name, with a list of its files, and renames it when it is complete. If
a file is missing or has another size, the script makes the folder again. A lock admits one process
at a time. A further folder has one link for each agent, for the tests. The whole cache may be
deleted at any time.

**Running.** An agent under test talks to a fake model on 127.0.0.1 and to no other host. The
network namespace guarantees this: it has no other route. `unshare -n` (`-rn` if not root) starts
this file again in a new network namespace. There the script raises `lo`, checks that every other
interface is down, and executes the command. The command finds the agents by `BANKSMAN_AGENTS`.

Where namespaces are not allowed, the command does not run. That is a failure in CI, and only a
message elsewhere. The same holds for an agent that is not available for this machine, or lacks the
Node.js that it needs: its tests are skipped.

Uses only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements" / "agents.json"
# Names in the cache that belong to no agent begin with a dot or with this prefix.
LINKS = "links"
STAMP = ".stamp.json"
UNFINISHED = ".unfinished-"
# The largest agent has 170 MB to download and 350 MB to unpack. The limit allows slow connections
# and ends hanging ones.
INSTALL_SECONDS_MAX = 1200.0
PROBE_SECONDS_MAX = 60.0
# Agents that are Node.js scripts, and the oldest major version of Node.js that they support.
NODE_VERSIONS_MIN = {"gemini": 20}

# From <linux/sockios.h> and <linux/if.h>. The script uses ioctl because small machines lack the
# `ip` program.
SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1
IFREQ = struct.Struct("16sH22x")


def loudly(*lines: str) -> None:
    print(
        "",
        "!" * 100,
        *(f"!! {line}" for line in lines),
        "!" * 100,
        "",
        sep="\n",
        file=sys.stderr,
        flush=True,
    )


def fail(*lines: str) -> NoReturn:
    loudly(*lines)
    sys.exit(1)


def fail_in_ci(*lines: str) -> None:
    """Report skipped tests; in CI this is a failure."""
    is_ci = "CI" in os.environ
    loudly(
        *lines,
        "In CI this is a failure." if is_ci else "Outside of CI this is no failure.",
    )
    if is_ci:
        sys.exit(1)


# ── Pins ──
@dataclass(frozen=True, slots=True)
class Pin:
    """The pinned packages of one agent for this machine. `program`: a path under node_modules."""

    agent: str
    program: str
    packages: Mapping[str, Mapping[str, str]]

    @property
    def version(self) -> str:
        """Version as the agent reports it: that of the package, without a platform suffix."""
        package = next(
            package
            for name, package in self.packages.items()
            if self.program.startswith(f"{name}/")
        )
        return package["version"].partition("-")[0]

    @property
    def folder(self) -> str:
        """Name of the cache folder, which depends on the pins only."""
        return f"{self.agent}-{self.version}-{digest(self.lock())}"

    def lock(self) -> dict[str, Any]:
        """Return a lock file for npm, with hashes and without URLs.

        npm checks its downloads against the hashes, and accepts a lock without URLs.
        """
        # Each package is listed as a dependency of the root: npm drops locked packages that no
        # package depends on.
        wanted = {name: package["version"] for name, package in self.packages.items()}
        locked = {f"node_modules/{name}": dict(package) for name, package in self.packages.items()}
        root = {"name": "agents", "dependencies": wanted}
        return {
            "name": "agents",
            "lockfileVersion": 3,
            "requires": True,
            "packages": {"": root, **locked},
        }


@functools.cache
def pins() -> dict[str, Pin]:
    """Return the pins for this machine by agent; empty where no agent can run."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return {}
    pinned: dict[str, dict[str, dict[str, Any]]] = json.loads(PINS.read_text())
    # Keyed by the machine name of the kernel.
    machine = platform.machine()
    return {
        agent: Pin(agent, **machines[machine])
        for agent, machines in pinned.items()
        if machine in machines
    }


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def check_complete() -> None:
    """Report the agents that cannot be tested here, and why."""
    lines: list[str] = []
    missing = sorted(set(json.loads(PINS.read_text())) - set(pins()))
    if missing:
        here = f"{sys.platform}, {platform.machine()}, {platform.libc_ver()[0] or 'another libc'}"
        lines += [
            (f"NO PINS FOR THIS MACHINE ({here}): {', '.join(missing)}. THEIR TESTS ARE SKIPPED."),
            "To run them here, add the packages and their hashes to requirements/agents.json.",
        ]
    for agent, least in NODE_VERSIONS_MIN.items():
        found = node_version()
        if agent in pins() and found < least:
            lines += [
                (
                    f"{agent.upper()} NEEDS NODE.JS {least} OR NEWER; "
                    f"THIS MACHINE HAS {found or 'NONE'}. ITS TESTS ARE SKIPPED."
                ),
                "Install Node.js, and put `node` on PATH.",
            ]
    if lines:
        fail_in_ci(*lines)


@functools.cache
def node_version() -> int:
    """Return the major version of Node.js; 0 if it is not installed."""
    node = shutil.which("node")
    if node is None:
        return 0
    said = subprocess.run(
        [node, "--version"], capture_output=True, text=True, check=False, timeout=PROBE_SECONDS_MAX
    )
    number = said.stdout.strip().removeprefix("v").partition(".")[0]
    return int(number) if number.isdigit() else 0


# ── Installing ──
def cache() -> Path:
    """Return the cache folder, which all checkouts of this user share."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG Base Directory Specification says to ignore a relative path, and "" is relative.
    return (named if named.is_absolute() else Path.home() / ".cache") / "banksman" / "agents"


def install() -> Path:
    """Install the missing agents and return their folder of links."""
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        for pin in pins().values():
            if not is_whole(folder / pin.folder, pin):
                install_one(folder, pin)
        return link(folder)


@contextlib.contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """Hold the lock of the cache: the first process installs, and the others find it done."""
    with open(folder / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # The process that made these folders died before it was done; otherwise it would still hold
        # the lock.
        for rest in folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(rest)
        yield


def install_one(folder: Path, pin: Pin) -> None:
    print(f"installing {pin.agent} {pin.version} into {folder}, without its scripts", flush=True)
    # In the same file system, so that it can be renamed.
    unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder))
    lock = pin.lock()
    (unfinished / "package.json").write_text(json.dumps(lock["packages"][""]))
    (unfinished / "package-lock.json").write_text(json.dumps(lock))
    fetch(pin, unfinished)
    if not os.access(unfinished / "node_modules" / pin.program, os.X_OK):
        fail(
            f"cannot use {pin.agent} {pin.version}: the installed packages lack {pin.program}.",
            "Check the pin in requirements/agents.json.",
        )
    (unfinished / STAMP).write_text(json.dumps(sizes(unfinished)))
    whole = folder / pin.folder
    if whole.exists():
        # The existing folder is incomplete. Rename it instead of deleting it in place: no process
        # must find half of it.
        whole.rename(folder / f"{UNFINISHED}{whole.name}")
    unfinished.rename(whole)


def is_whole(whole: Path, pin: Pin) -> bool:
    """Whether all installed files exist with their sizes.

    Hashing 1.5 GB at each start would be too slow.
    """
    try:
        stamp = json.loads((whole / STAMP).read_text())
        return stamp == sizes(whole) and os.access(whole / "node_modules" / pin.program, os.X_OK)
    except (OSError, ValueError):
        return False


def sizes(folder: Path) -> dict[str, int]:
    """Return the size of every file by its path."""
    files = (
        Path(place) / name for place, _, names in os.walk(folder) for name in names if name != STAMP
    )
    return {str(path.relative_to(folder)): path.lstat().st_size for path in files}


def link(folder: Path) -> Path:
    """Make the folder of links, which maps each agent name to its program.

    The tests therefore need not know the paths inside the packages.
    """
    wanted = {pin.agent: f"../{pin.folder}/node_modules/{pin.program}" for pin in pins().values()}
    links = folder / f"{LINKS}-{digest(wanted)}"
    with contextlib.suppress(OSError):  # The folder does not exist, or an entry is not a link.
        if {path.name: os.readlink(path) for path in links.iterdir()} == wanted:
            return links
    unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder))
    for agent, target in wanted.items():
        (unfinished / agent).symlink_to(target)
    if links.exists():
        links.rename(folder / f"{UNFINISHED}{links.name}")
    return unfinished.rename(links)


def fetch(pin: Pin, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        fail(
            "cannot download the agents: npm is not on PATH.",
            "Install Node.js 20 or newer, which includes npm.",
        )
    # `ci` instead of `install`: a package that the lock lacks is an error, and npm does not rewrite
    # the lock.
    command = [
        npm,
        "ci",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--no-update-notifier",
        "--loglevel=error",
    ]
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, check=False, timeout=INSTALL_SECONDS_MAX
        ).returncode
    except subprocess.TimeoutExpired:
        done = None
    if done != 0:
        how = (
            f"ended with {done}"
            if done is not None
            else f"did not end within {INSTALL_SECONDS_MAX:.0f} s"
        )
        fail(
            f"cannot install {pin.agent}: npm ci {how}. Its output is above.",
            "Check the network and the registry (`npm config get registry`).",
            "EINTEGRITY: the package of the registry has another hash than the pin. "
            "Do not trust it; find out why.",
            "An installed agent needs no network.",
        )


# ── Running ──
def again(*words: str) -> list[str]:
    """Return the command that starts this file again in a new network namespace."""
    # A user other than root also gets a user namespace, in which it may create the network
    # namespace.
    flags = "-n" if os.geteuid() == 0 else "-rn"
    return ["unshare", flags, sys.executable, str(Path(__file__).resolve()), "alone", *words]


def why_not_alone() -> str | None:
    """Return the reason why a namespace is impossible, or None.

    The probe runs to the end: creating a namespace may be allowed and raising `lo` not.
    """
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
    return (
        None
        if probe.returncode == 0
        else (probe.stderr or probe.stdout).strip()[-500:] or "unshare failed without output"
    )


def run(command: Sequence[str]) -> NoReturn:
    why = why_not_alone()
    if why is not None:
        fail_in_ci(
            "THE TESTS WITH REAL AGENTS WERE NOT RUN.",
            "They need a network namespace with only loopback, which this machine does not allow:",
            *(f"    {line}" for line in why.splitlines()),
            "Install unshare. Be root (in a container: with SYS_ADMIN), or allow user namespaces",
            "(kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0).",
        )
        sys.exit(0)
    check_complete()
    os.environ["BANKSMAN_AGENTS"] = str(install())
    words = again(*command)
    os.execvp(words[0], words)


def alone(command: Sequence[str]) -> None:
    """Raise `lo`, check that no other interface is up, and execute the command.

    Runs inside the namespace.
    """
    raise_loopback()
    others = sorted(interfaces_up() - {"lo"})
    assert not others, f"the network namespace has other interfaces: {others}"
    if command:
        os.execvp(command[0], list(command))


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = IFREQ.unpack(fcntl.ioctl(any_socket, SIOCGIFFLAGS, IFREQ.pack(b"lo", 0)))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, IFREQ.pack(b"lo", flags | IFF_UP))


def interfaces_up() -> set[str]:
    """Return the interfaces that can send.

    Some kernels put the fallback devices of their tunnels (sit0, tunl0) into every new namespace.
    These devices exist, but they are down and lead nowhere.
    """
    found: set[str] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            _, flags = IFREQ.unpack(
                fcntl.ioctl(any_socket, SIOCGIFFLAGS, IFREQ.pack(name.encode(), 0))
            )
            if flags & IFF_UP:
                found.add(name)
    return found


def main() -> None:
    match sys.argv[1:]:
        case ["install"]:
            check_complete()
            print(install())
        case ["run", first, *rest]:
            run([first, *rest])
        case ["alone", *command]:
            alone(command)
        case _:
            sys.exit("usage: agents.py install | run COMMAND [WORDS …]")


if __name__ == "__main__":
    main()
