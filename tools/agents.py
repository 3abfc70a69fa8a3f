"""Installs the real agents that the tests drive, and runs a command where they can reach nobody.

    python3 tools/agents.py install                  fetch what is not there yet, and print where all of it is
    python3 tools/agents.py run COMMAND [WORDS …]    the same, then COMMAND in a network namespace with loopback alone

**Installing.** requirements/agents.json pins each agent's packages by version and by hash. npm fetches them and runs
none of their scripts. Which registry, is what npm is configured to; no address is written here, and the hash holds
whichever it is.

**Keeping.** They are 1.3 GB, so they are kept outside the checkout, in `$XDG_CACHE_HOME/banksman/agents` (or
`~/.cache/…`), and a second checkout fetches nothing. Each agent has a folder there, named by its pins: to pin another
version is to ask for another folder. It is made under another name and renamed when it is whole, with a list of its
files in it; if one of them is gone or has another size, it is made anew. One process at a time does that, by a lock.
Beside them is a folder of links, one for each agent, that the tests look into. All of it may be deleted at any time.

**Running.** An agent under test talks to a model that a test plays on 127.0.0.1, and to nobody else: not by care, but
because there is nobody else. `unshare -n` (`-rn` if not root) starts this file again, in a network namespace of its
own; there `lo` is raised, every other interface is seen to be down, and the command takes over. It finds the agents by
`BANKSMAN_AGENTS`. Where namespaces are not allowed, nothing is run: by hand that is said and is no failure, in CI it is
one. The same goes for an agent that is not for this machine, or lacks the Node.js that it needs: its tests are left
out.

Only the standard library.
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
# Names in the cache that are no agent's begin with a dot, or are the links'.
LINKS = "links"
STAMP = ".stamp.json"
UNFINISHED = ".unfinished-"
# 170 MB to fetch and 350 MB to unpack, for the largest: slow lines are met, hanging ones end.
INSTALL_SECONDS_MAX = 1200.0
PROBE_SECONDS_MAX = 60.0
# Those that are scripts and no programs of their own, and the oldest Node.js that they run on.
NODE_VERSIONS_MIN = {"gemini": 20}

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


def fail_in_ci(*lines: str) -> None:
    """Something is left out. By hand that is said, and in CI nothing may be left out."""
    is_ci = "CI" in os.environ
    loudly(*lines, "In CI this is a failure." if is_ci else "By hand this is no failure; in CI it would be one.")
    if is_ci:
        sys.exit(1)


# -- what is pinned --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Pin:
    """One agent as this machine can run it. `program` is a path under node_modules."""

    agent: str
    program: str
    packages: Mapping[str, Mapping[str, str]]

    @property
    def version(self) -> str:
        """As the agent itself says it: the package's, without the platform that some have in theirs."""
        package = next(package for name, package in self.packages.items() if self.program.startswith(f"{name}/"))
        return package["version"].partition("-")[0]

    @property
    def folder(self) -> str:
        """Its name in the cache: the same pins have the same, and others another."""
        return f"{self.agent}-{self.version}-{digest(self.lock())}"

    def lock(self) -> dict[str, Any]:
        """npm checks what it fetches against the hashes of a lock, and takes a lock without addresses."""
        # Each package is named as if we wanted it: npm drops what is in a lock and wanted by nobody.
        wanted = {name: package["version"] for name, package in self.packages.items()}
        locked = {f"node_modules/{name}": dict(package) for name, package in self.packages.items()}
        root = {"name": "agents", "dependencies": wanted}
        return {"name": "agents", "lockfileVersion": 3, "requires": True, "packages": {"": root, **locked}}


@functools.cache
def pins() -> dict[str, Pin]:
    """What this machine can run, by the agents' names; empty where nothing can."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return {}
    pinned: dict[str, dict[str, dict[str, Any]]] = json.loads(PINS.read_text())
    # By the machine's name as the kernel has it.
    machine = platform.machine()
    return {agent: Pin(agent, **machines[machine]) for agent, machines in pinned.items() if machine in machines}


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def check_complete() -> None:
    """Say which agents will be missed here, and why."""
    lines: list[str] = []
    missing = sorted(set(json.loads(PINS.read_text())) - set(pins()))
    if missing:
        here = f"{sys.platform}, {platform.machine()}, {platform.libc_ver()[0] or 'another libc'}"
        lines += [
            f"NOT PINNED FOR THIS MACHINE ({here}): {', '.join(missing)}. THEIR TESTS ARE LEFT OUT.",
            "Whoever wants to test here: add their packages and hashes to requirements/agents.json.",
        ]
    for agent, least in NODE_VERSIONS_MIN.items():
        found = node_version()
        if agent in pins() and found < least:
            lines += [
                f"{agent.upper()} NEEDS NODE.JS {least} OR NEWER; HERE IS {found or 'NONE'}. ITS TESTS ARE LEFT OUT.",
                "Whoever runs this machine: install it, and have `node` on PATH.",
            ]
    if lines:
        fail_in_ci(*lines)


@functools.cache
def node_version() -> int:
    """The first number of Node.js's version; 0 if there is none."""
    node = shutil.which("node")
    if node is None:
        return 0
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False, timeout=PROBE_SECONDS_MAX)
    number = said.stdout.strip().removeprefix("v").partition(".")[0]
    return int(number) if number.isdigit() else 0


# -- installing ------------------------------------------------------------------------------------------------------
def cache() -> Path:
    """Where the agents are kept, for all checkouts of this user."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative one is to be ignored, says the XDG Base Directory Specification; and "" is relative.
    return (named if named.is_absolute() else Path.home() / ".cache") / "banksman" / "agents"


def install() -> Path:
    """Afterwards all pinned agents are there; those that already were are left alone. Their folder of links."""
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        for pin in pins().values():
            if not is_whole(folder / pin.folder, pin):
                install_one(folder, pin)
        return link(folder)


@contextlib.contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """Of several at once, in whichever checkouts, the first installs and the others find it done."""
    with open(folder / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # Whoever made these was ended before it was done, or it would still hold the lock.
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
            f"{pin.agent} {pin.version} was installed, and has no program {pin.program} in it.",
            "The pin in requirements/agents.json must be looked at.",
        )
    (unfinished / STAMP).write_text(json.dumps(sizes(unfinished)))
    whole = folder / pin.folder
    if whole.exists():
        # It was not whole. Renamed and not deleted in place, for nobody is to find half of it.
        whole.rename(folder / f"{UNFINISHED}{whole.name}")
    unfinished.rename(whole)


def is_whole(whole: Path, pin: Pin) -> bool:
    """Whether all that was installed is there. By the sizes: the hashes of 1.3 GB at each start would be too slow."""
    try:
        stamp = json.loads((whole / STAMP).read_text())
        return stamp == sizes(whole) and os.access(whole / "node_modules" / pin.program, os.X_OK)
    except (OSError, ValueError):
        return False


def sizes(folder: Path) -> dict[str, int]:
    """Of every file, by its path."""
    files = (Path(place) / name for place, _, names in os.walk(folder) for name in names if name != STAMP)
    return {str(path.relative_to(folder)): path.lstat().st_size for path in files}


def link(folder: Path) -> Path:
    """A folder in which each agent's program has the agent's name: the tests need not know where packages keep it."""
    wanted = {pin.agent: f"../{pin.folder}/node_modules/{pin.program}" for pin in pins().values()}
    links = folder / f"{LINKS}-{digest(wanted)}"
    with contextlib.suppress(OSError):  # There is none, or something in it is no link.
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
            "npm is not on PATH, and the real agents come from its registry.",
            "Whoever runs this machine: install Node.js 20 or newer, which brings npm.",
        )
    # `ci` and not `install`: what the lock does not say is an error, and the lock is not rewritten.
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, check=False, timeout=INSTALL_SECONDS_MAX
        ).returncode
    except subprocess.TimeoutExpired:
        done = None
    if done != 0:
        how = f"ended with {done}" if done is not None else f"did not end within {INSTALL_SECONDS_MAX:.0f} s"
        fail(
            f"{pin.agent} could not be installed: npm ci {how}; what it said is above.",
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
        fail_in_ci(
            "THE TESTS WITH REAL AGENTS WERE NOT RUN.",
            "They start them in a network namespace that holds only loopback, and there can be none here:",
            *(f"    {line}" for line in why.splitlines()),
            "Whoever runs this machine: be root in it (in a container: with SYS_ADMIN), or allow user namespaces",
            "(kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), and have unshare.",
        )
        sys.exit(0)
    check_complete()
    os.environ["BANKSMAN_AGENTS"] = str(install())
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
