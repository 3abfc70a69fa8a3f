"""Programs that tests need from the system: found, or installed by apt-get where that may be.

    python3 tools/debian.py zsh fish      each program is in the package of its name

What it promises: afterwards they are there, or somebody was told loudly which are not and what to do. That is code 0 by
hand, since what needs them is skipped, and code 1 where `CI` is set, where nothing may be left out quietly. It installs
only as root and only with apt-get, which is the case in a container or on a machine made for tests; on anybody else's
machine it changes nothing.

Only the standard library: `make test` calls it before anything else is known to be there.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

# A mirror that hangs must not keep `make test` for ever.
INSTALL_SECONDS_MAX = 300.0
_LINE = "=" * 92


def why_not() -> str:
    """Why nothing may be installed; empty: it may."""
    if os.geteuid() != 0:
        return "We are not root, and install nothing."
    if shutil.which("apt-get") is None:
        return "There is no apt-get here."
    return ""


def install(*packages: str) -> str:
    """Why it could not; empty: they are there. What apt-get says is shown only if it fails."""
    print(f"installing {' '.join(packages)} for the tests, by apt-get (once)", file=sys.stderr, flush=True)
    first = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages]
    said = ""
    # The lists of a fresh container are empty or old, and those of a machine that is used are not: ask only if needed.
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
    """The exit code: nothing that is missing is passed over in CI."""
    print("\n".join(["", _LINE, *(f" {line}" for line in lines), _LINE, ""]), file=sys.stderr, flush=True)
    return 1 if "CI" in os.environ else 0


def main(names: Sequence[str]) -> int:
    missing = [name for name in names if shutil.which(name) is None]
    why = (why_not() or install(*missing)) if missing else ""
    left = [name for name in missing if shutil.which(name) is None]
    if not left:
        return 0
    told = f"NO {' AND NO '.join(left).upper()}, SO WHAT NEEDS THEM IS NOT TESTED. {why}"
    return say_loudly(told, f"Debian, Ubuntu:  sudo apt-get install {' '.join(left)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
