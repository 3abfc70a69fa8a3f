"""Far ends of a prefix: a real sshd on loopback, and a container made of namespaces with its daemon.

Each has its own folder and ends with its block. The user of a far end is that of the test, or `nobody`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.process import other_user
from tests.process.helpers import NOBODY, wait_until
from tools import guard_file

from banksman.sessions.command_prefix import SANDBOXES

BIN = str(Path(sys.executable).parent)
# The longest life of a daemon or a container, if a test is killed.
SECONDS_MAX = 120
PRIVILEGES = Path("/run/sshd")
SSHD = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
SetEnv PATH={path}
"""
SSH = """
Host far
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
  LogLevel ERROR
"""
# The role of dockerd: starts each command inside the container as its own child. The streams are those of the client.
DAEMON = """
import array, json, os, signal, socket, subprocess, sys, threading
path, pid, seconds = sys.argv[1:4]
signal.alarm(int(seconds))
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
def serve(client):
    data, fds, _, _ = socket.recv_fds(client, 1 << 20, 3)
    order = json.loads(data)
    enter = ["nsenter", "--target", pid, "--user", "--preserve-credentials", "--pid", "--mount"]
    command = [*enter, f"--wd={order['cwd']}", "--", *order["argv"]]
    env = {"PATH": order["path"]}
    child = subprocess.Popen(command, stdin=fds[0], stdout=fds[1], stderr=fds[2], env=env)
    for fd in fds:
        os.close(fd)
    client.sendall(b"%d" % (child.wait() & 255))
    client.close()
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
# The role of `docker exec -i --workdir FOLDER BOX COMMAND …`; BOX is the socket of the daemon.
CLIENT = """
import json, os, socket, sys
word, interactive, workdir, folder, box, *argv = sys.argv[1:]
assert (word, interactive, workdir) == ("exec", "-i", "--workdir")
peer = socket.socket(socket.AF_UNIX)
peer.connect(box)
order = {"argv": argv, "cwd": folder, "path": os.environ["PATH"]}
socket.send_fds(peer, [json.dumps(order).encode()], [0, 1, 2])
os.close(0)
os.close(1)
sys.exit(int(peer.recv(16) or b"255"))
"""


def program(folder: Path, name: str, text: str) -> None:
    """Write a program to a folder that PATH shall have first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


# sshd sees another /etc/passwd, in which `nobody` has a shell.
PASSWD = 'mount --bind "$0" /etc/passwd && exec "$@"'


def shell_for_nobody(folder: Path) -> list[str]:
    """Return the prefix of a program for which `nobody` has a shell."""
    fields = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    lines = [":".join([*each[:6], "/bin/sh"] if each[2] == str(NOBODY) else each) for each in fields]
    (folder / "passwd").write_text("\n".join([*lines, ""]))
    return ["unshare", "--mount", "sh", "-c", PASSWD, str(folder / "passwd")]


def guard_for_nobody(folder: Path) -> Path:
    """Write a `banksman` that can only guard, and that every user can run. Return its folder."""
    file = folder / "guard.pyz"
    guard_file.build(file)
    program(folder / "far-bin", "banksman", f'#!/bin/sh\nshift\nexec {other_user.PYTHON} "{file}" "$@"\n')
    return folder / "far-bin"


@contextmanager
def sshd(folder: Path, *, is_for_nobody: bool = False) -> Generator[Path]:
    """Run an sshd, and yield a folder with an `ssh` that knows it as the host `far`."""
    # sshd must be started by its path, and it leaves the directory of another sshd alone.
    server = shutil.which("sshd")
    assert server is not None
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    user = pwd.getpwuid(NOBODY if is_for_nobody else os.geteuid()).pw_name
    programs = guard_for_nobody(folder) if is_for_nobody else BIN
    words = {"folder": folder, "port": port, "user": user, "path": f"{programs}:{os.environ['PATH']}"}
    (folder / "sshd_config").write_text(SSHD.format(**words))
    (folder / "ssh_config").write_text(SSH.format(**words))
    program(folder / "bin", "ssh", f'#!/bin/sh\nexec {shutil.which("ssh")} -F "{folder}/ssh_config" "$@"\n')
    makes = os.geteuid() == 0 and not PRIVILEGES.exists()
    if makes:
        PRIVILEGES.mkdir(mode=0o755)
    prefix = shell_for_nobody(folder) if is_for_nobody else []
    command = [*prefix, server, "-D", "-e", "-f", str(folder / "sshd_config")]
    try:
        with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
            try:
                wait_until(lambda: b"listening" in (folder / "log").read_bytes(), "sshd")
                yield folder / "bin"
            finally:
                process.kill()
    finally:
        if makes:
            with suppress(OSError):
                PRIVILEGES.rmdir()


@contextmanager
def container(folder: Path) -> Generator[Path]:
    """Run a container and its daemon, and yield a folder with a `docker` that executes commands in the box `far`."""
    life = ["sh", "-c", 'echo up; exec sleep "$0"', str(SECONDS_MAX)]
    with subprocess.Popen([*SANDBOXES["unshare"], *life], stdout=subprocess.PIPE) as box:
        assert box.stdout is not None
        assert box.stdout.readline() == b"up\n"
        (first,) = Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text().split()
        path = folder / "far"
        daemon = [sys.executable, "-I", "-S", "-c", DAEMON, str(path), first, str(SECONDS_MAX)]
        try:
            with subprocess.Popen(daemon) as process:
                try:
                    wait_until(path.exists, "the daemon")
                    (folder / "client.py").write_text(CLIENT)
                    client = f'#!/bin/sh\nexec {sys.executable} -I -S "{folder}/client.py" "$@"\n'
                    program(folder / "bin", "docker", client)
                    yield folder / "bin"
                finally:
                    process.kill()
        finally:
            # The first process of the container: the kernel ends the others with it.
            os.kill(int(first), signal.SIGKILL)
