"""Find system programs that tests need; install missing ones with apt-get where allowed.

    python3 tools/debian.py zsh fish bwrap ssh sshd

Afterwards the programs exist, or a loud message names the missing ones and how to install them.
Missing programs give code 0 on a developer machine, because their tests are skipped. They give code
1 where `CI` is set, because CI must not skip tests silently.

The script installs only as root and only with apt-get, as in a container or on a test machine. On
any other machine it changes nothing.

Uses only the standard library: `make test` runs it before any dependency is installed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

# A mirror that hangs must not block `make test` forever.
INSTALL_SECONDS_MAX = 300.0
# Packages that are not called like their program.
PACKAGES = {
    "bwrap": "bubblewrap",
    "promtool": "prometheus",
    "linux.uml": "user-mode-linux",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "systemd-run": "systemd",
}
_LINE = "=" * 92


def why_not() -> str:
    """Return the reason why nothing may be installed; empty if installing is allowed."""
    if os.geteuid() != 0:
        return "Nothing was installed: this user is not root."
    if shutil.which("apt-get") is None:
        return "Nothing was installed: this machine has no apt-get."
    return ""


def install(*packages: str) -> str:
    """Install packages and return the error; empty on success.

    The output of apt-get is shown only if it fails.
    """
    print(
        f"installing {' '.join(packages)} with apt-get, for the tests (once)",
        file=sys.stderr,
        flush=True,
    )
    first = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages]
    said = ""
    # The package lists of a fresh container are empty or old; those of a machine in use are not. So
    # update them only if the first attempt fails.
    for command in (first, ["apt-get", "update", "--quiet"], first):
        failed = _failed(command)
        if command is first and not failed:
            return ""
        said = failed or said
    return f"apt-get failed: {said}"


def _failed(command: Sequence[str]) -> str:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            timeout=INSTALL_SECONDS_MAX,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stdout.strip().splitlines() or [f"code {done.returncode}"]
    return lines[-1] if done.returncode != 0 else ""


def say_loudly(*lines: str) -> int:
    """Print a prominent message and return the exit code: 1 in CI, where nothing may be skipped."""
    print(
        "\n".join(["", _LINE, *(f" {line}" for line in lines), _LINE, ""]),
        file=sys.stderr,
        flush=True,
    )
    return 1 if "CI" in os.environ else 0


def main(names: Sequence[str]) -> int:
    missing = [name for name in names if shutil.which(name) is None]
    why = (why_not() or install(*_packages(missing))) if missing else ""
    left = [name for name in missing if shutil.which(name) is None]
    if not left:
        return 0
    told = f"NO {' AND NO '.join(left).upper()}: THE TESTS THAT NEED THEM ARE SKIPPED. {why}"
    return say_loudly(told, f"Debian, Ubuntu:  sudo apt-get install {' '.join(_packages(left))}")


def _packages(programs: Sequence[str]) -> list[str]:
    return [PACKAGES.get(program, program) for program in programs]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
