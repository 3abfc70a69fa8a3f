"""Make a virtual environment from a hashed lock, with this checkout as an editable package.

    python3 tools/venv.py .venv requirements/dev.txt

Afterwards the environment holds the packages of the lock, for the Python that runs this file.

- If the environment is up to date, the script does and downloads nothing.
- If only pyproject.toml changed, the script installs only the package again.
- If another input changed (the lock, the Python, the path of the checkout), the script makes the
  environment from scratch. A package that left the lock thereby leaves the environment too.

Uses only the standard library, and syntax that an old Python can parse: an old Python must get the
message of this script and not a SyntaxError. Uses uv if it is on PATH, because it is fast;
otherwise venv and pip.
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
    """Return the uv on PATH if it starts.

    The shim of a version manager may be on PATH without a program behind it.
    """
    uv = shutil.which("uv")
    if uv is None:
        return None
    works = subprocess.run(
        [uv, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
    return uv if works.returncode == 0 else None


def run(*command: "str | Path") -> None:
    if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        sys.exit("command failed: " + " ".join(str(word) for word in command))


def make(folder: Path, uv: "str | None") -> None:
    if uv is not None:
        run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder)
        return
    # Debian and Ubuntu ship Python without these two modules. Check before creating the
    # environment, so that no half-made one is left. A folder that only holds old bytecode is found
    # as a package without an origin, so it counts as missing.
    specs = [importlib.util.find_spec(module) for module in ("venv", "ensurepip")]
    if any(spec is None or spec.origin is None for spec in specs):
        sys.exit(
            "cannot create a virtual environment: "
            f"{sys.executable} lacks the module venv or ensurepip.\n"
            "Debian, Ubuntu: apt-get install python3-venv\n"
            "(for a Python other than the system's: "
            f"python{sys.version_info[0]}.{sys.version_info[1]}-venv)"
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
            "banksman needs Python 3.11 or newer, "
            f"but {sys.executable} is {sys.version.split()[0]}.\n"
            "Install a newer Python, or name an installed one: make PYTHON=python3.12 ..."
        )
    folder, lock = ROOT / sys.argv[1], ROOT / sys.argv[2]
    if sys.version_info[:2] > NEWEST_TESTED:
        print(
            "note: banksman is tested on Python 3.11 to 3.13, "
            f"but this Python is {sys.version.split()[0]}",
            file=sys.stderr,
        )

    stamp = folder / ".stamp.json"
    with lock.open("rb") as held:
        # Two runs of make at the same time (tests in one terminal, checks in another) must not
        # install into the same folder. The requirements file serves as the lock file because it
        # already exists: no new file to ignore or to clean up.
        fcntl.flock(held, fcntl.LOCK_EX)
        # An environment contains the paths of its checkout and of its Python, so a copy does not
        # work.
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
            print(
                f"making {folder.name} from {sys.argv[2]}, with Python {sys.version.split()[0]}",
                flush=True,
            )
            make(folder, uv)
            run(*install, "--require-hashes", "-r", lock)
        else:
            stamp.unlink()
        # The build backend comes from the lock. Without build isolation, nothing else is
        # downloaded.
        run(*install, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        # Written last: an interrupted install leaves no stamp, and the next run starts again.
        stamp.write_text(json.dumps(wanted))


if __name__ == "__main__":
    main()
