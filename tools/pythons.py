"""Runs pytest on each other Python from 3.11 to 3.13 that this machine has, and says which it did not have.

    python3 tools/pythons.py [ARGUMENTS OF PYTEST ...]

"Other" than the one `.venv` was made with, which `make test` covers. One interpreter is taken per minor version, the
newest: candidates are what PATH calls python3.N, what pyenv keeps, and what uv knows. A candidate counts only if it
starts and tells its own version, because a version manager's shim is on PATH even where nothing is behind it. Each gets
an environment of its own (.venv-3.12, …) from the same lock, by tools/venv.py.

The oldest and the newest run every second test, one in between every third. Most families of tests differ only in
data, so that each part of the code is still tried. CI has 45 minutes for everything. For all tests:
BANKSMAN_TEST_ONE_IN=1 make test-pythons.

A Python that is missing is no failure, but it is named in the last lines, so that nobody takes silence for a pass.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINORS = (11, 12, 13)
# One in so many tests runs on the oldest and the newest, and on one in between: see tests/conftest.py.
ONE_IN, ONE_IN_BETWEEN = "2", "3"

# Run by the candidate. The project promises finished releases of CPython: a pre-release, PyPy or a free-threaded build
# under the same name must not stand in for one.
PROBE = """
import json, sys, sysconfig
print(json.dumps({
    "executable": sys.executable,
    "version": list(sys.version_info[:3]),
    "meant": sys.implementation.name == "cpython" and sys.version_info[3] == "final"
        and not sysconfig.get_config_var("Py_GIL_DISABLED"),
}))
"""
PROBE_SECONDS_MAX = 30.0


@dataclass(frozen=True, slots=True, order=True)
class Interpreter:
    version: tuple[int, int, int]
    executable: str

    @property
    def minor(self) -> int:
        return self.version[1]

    @property
    def name(self) -> str:
        return ".".join(str(number) for number in self.version)


def answer(*command: str) -> str | None:
    """What the command prints, or None if it cannot be started, fails or hangs: then it is no candidate."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def candidates() -> Iterator[str]:
    for minor in MINORS:
        for folder in os.environ.get("PATH", "").split(os.pathsep):
            # Each of PATH, not only the first: a dead shim often lies before the real one.
            found = shutil.which(f"python3.{minor}", path=folder or os.curdir)
            if found is not None:
                yield found
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for path in sorted(pyenv.glob("versions/3.*/bin/python3")):
        yield str(path)
    uv = shutil.which("uv")
    listing = answer(uv, "python", "list", "--only-installed", "--output-format", "json") if uv is not None else None
    for entry in json.loads(listing or "[]"):
        if entry.get("path"):
            yield str(entry["path"])


def probe(executable: str) -> Interpreter | None:
    told = answer(executable, "-I", "-c", PROBE)
    if told is None:
        return None
    facts = json.loads(told)
    major, minor, patch = facts["version"]
    if not facts["meant"] or major != 3 or minor not in MINORS:
        return None
    return Interpreter((major, minor, patch), facts["executable"])


def newest_of_each_minor() -> dict[int, Interpreter]:
    found: dict[int, Interpreter] = {}
    for executable in dict.fromkeys(candidates()):
        interpreter = probe(executable)
        if interpreter is not None and (interpreter.minor not in found or interpreter > found[interpreter.minor]):
            found[interpreter.minor] = interpreter
    return found


def own_minor() -> int:
    """The minor version that `make test` covers: that of .venv, or of this Python, with which .venv would be made."""
    own = probe(str(ROOT / ".venv" / "bin" / "python"))
    return own.minor if own is not None else sys.version_info[1]


def passes(interpreter: Interpreter, arguments: list[str]) -> bool:
    folder = f".venv-3.{interpreter.minor}"
    print(f"\n=== Python {interpreter.name} ===", flush=True)
    steps = (
        [interpreter.executable, "tools/venv.py", folder, "requirements/dev.txt"],
        [f"{folder}/bin/python", "-m", "pytest", *arguments],
    )
    share = ONE_IN_BETWEEN if min(MINORS) < interpreter.minor < max(MINORS) else ONE_IN
    env = {"BANKSMAN_TEST_ONE_IN": share, **os.environ}
    return all(
        subprocess.run(step, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, check=False).returncode == 0 for step in steps
    )


def main() -> int:
    own = own_minor()
    others = {minor: interpreter for minor, interpreter in newest_of_each_minor().items() if minor != own}
    missing = [minor for minor in MINORS if minor != own and minor not in others]

    # All are run even if one fails: which of them fail is the first thing one wants to know.
    results = {minor: passes(others[minor], sys.argv[1:]) for minor in sorted(others)}

    print("\n=== the other Pythons ===")
    print(f"3.{own}: covered by make test")
    for minor, passed in results.items():
        print(f"3.{minor}: {'passed' if passed else 'FAILED'} on {others[minor].name}")
    for minor in missing:
        print(f"3.{minor}: NOT RUN, no such Python was found on this machine")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
