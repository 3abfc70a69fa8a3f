"""Makes a virtual environment from a hashed lock, and puts this checkout into it as an editable package.

    python3 tools/venv.py .venv requirements/dev.txt

What it promises: afterwards the environment holds what the lock names, made by the Python that ran this file. If it
already does, nothing is done and nothing is fetched. If only pyproject.toml changed, only the package is
installed again. If anything else changed (the lock, the Python, the place of the checkout), the environment is made
from nothing, so that a package which left the lock leaves the environment too.

Only the standard library, and syntax that an old Python can read: the message that it is too old must come from here,
not from a SyntaxError. uv is used where it is on PATH, because it is fast; venv and pip otherwise.
"""

import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
NEWEST_TESTED = (3, 13)
ROOT = Path(__file__).resolve().parent.parent


def digest(*parts: "str | bytes") -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part if isinstance(part, bytes) else part.encode()).digest())
    return total.hexdigest()


def find_uv() -> "str | None":
    """The uv on PATH, if it really starts: a version manager's shim may lie on PATH without a program behind it."""
    uv = shutil.which("uv")
    if uv is None:
        return None
    works = subprocess.run([uv, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return uv if works.returncode == 0 else None


def run(*command: "str | Path") -> None:
    if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        sys.exit("this step failed: " + " ".join(str(word) for word in command))


def make(folder: Path, uv: "str | None") -> None:
    if uv is not None:
        run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder)
        return
    # Debian and Ubuntu ship Python without these two. Asked before anything is made: no half environment is left.
    # A folder that only holds old bytecode is found too, as a package without an origin: it counts as not there.
    specs = [importlib.util.find_spec(module) for module in ("venv", "ensurepip")]
    if any(spec is None or spec.origin is None for spec in specs):
        sys.exit(
            f"{sys.executable} cannot make virtual environments: it has no venv or no ensurepip.\n"
            "On Debian and Ubuntu: apt-get install python3-venv\n"
            f"(for a Python that is not the system's own: python{sys.version_info[0]}.{sys.version_info[1]}-venv)"
        )
    run(sys.executable, "-m", "venv", "--clear", folder)


def installer(python: Path, uv: "str | None") -> "list[str | Path]":
    if uv is not None:
        return [uv, "pip", "install", "--quiet", "--python", python]
    return [python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: venv.py FOLDER LOCK")
    if sys.version_info < OLDEST:
        sys.exit(
            f"banksman needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}.\n"
            "Install a newer one, or name one that is here: make PYTHON=python3.12 ..."
        )
    folder, lock = ROOT / sys.argv[1], ROOT / sys.argv[2]
    if sys.version_info[:2] > NEWEST_TESTED:
        print(f"note: banksman is tested on Python 3.11 to 3.13, and this is {sys.version.split()[0]}", file=sys.stderr)

    stamp = folder / ".stamp.json"
    with lock.open("rb") as held:
        # Two runs of make at once (tests in one terminal, checks in another) must not install into one folder together.
        # The lock file of the requirements is locked because it is there already: nothing new to ignore or to clean.
        fcntl.flock(held, fcntl.LOCK_EX)
        # An environment has the path of its checkout and of its Python written into it: a copy of one does not work.
        wanted = {
            "environment": digest(held.read(), sys.version, sys.executable, str(ROOT)),
            "package": digest((ROOT / "pyproject.toml").read_bytes()),
        }
        try:
            found: dict[str, str] = json.loads(stamp.read_text())
        except (OSError, ValueError):
            found = {}
        if found == wanted:
            return

        uv = find_uv()
        python = folder / "bin" / "python"
        install = installer(python, uv)
        if found.get("environment") != wanted["environment"]:
            print(f"making {folder.name} from {sys.argv[2]}, with Python {sys.version.split()[0]}", flush=True)
            make(folder, uv)
            run(*install, "--require-hashes", "-r", lock)
        else:
            stamp.unlink()
        # The build backend comes from the lock; without build isolation nothing else is asked of the registry.
        run(*install, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        # Last: an install that was cut short leaves no stamp, and the next run starts again.
        stamp.write_text(json.dumps(wanted))


if __name__ == "__main__":
    main()
