"""Run pytest on every other installed Python from 3.11 to 3.13, and name the missing ones.

    python3 tools/pythons.py [ARGUMENTS OF PYTEST ...]

"Other" means other than the Python of `.venv`, which `make test` covers. The script takes the
newest interpreter of each minor version. Candidates are python3.N on PATH, the versions of pyenv,
and the versions that uv knows. A candidate counts only if it starts and reports its version,
because the shim of a version manager may be on PATH without an interpreter. Each interpreter gets a
separate environment (.venv-3.12, …) from the same lock, made by tools/venv.py.

The oldest and the newest Python run every second test, and a Python in between runs every third. CI
has 45 minutes for the whole run. Most families of tests differ only in data, so each part of the
code is still tested. For all tests: BANKSMAN_TEST_ONE_IN=1 make test-pythons.

A missing Python is no failure. The last lines of the output name it, so that its absence is not
taken for a pass.
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
# Fraction of the tests on the oldest and the newest Python, and on a Python in between: see
# tests/conftest.py.
ONE_IN, ONE_IN_BETWEEN = "2", "3"

# Run by the candidate. The project supports final releases of CPython. A pre-release, PyPy or a
# free-threaded build under the same name must not replace one.
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
    """Return the output of a command; None if it cannot be started, fails or hangs."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def candidates() -> Iterator[str]:
    for minor in MINORS:
        for folder in os.environ.get("PATH", "").split(os.pathsep):
            # Search each folder of PATH, not only the first match: a dead shim often precedes the
            # real one.
            found = shutil.which(f"python3.{minor}", path=folder or os.curdir)
            if found is not None:
                yield found
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for path in sorted(pyenv.glob("versions/3.*/bin/python3")):
        yield str(path)
    uv = shutil.which("uv")
    listing = (
        answer(uv, "python", "list", "--only-installed", "--output-format", "json")
        if uv is not None
        else None
    )
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
        if interpreter is not None and (
            interpreter.minor not in found or interpreter > found[interpreter.minor]
        ):
            found[interpreter.minor] = interpreter
    return found


def own_minor() -> int:
    """Return the minor version that `make test` covers.

    It is that of .venv, or of this Python, which would make .venv.
    """
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
        subprocess.run(step, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, check=False).returncode
        == 0
        for step in steps
    )


def main() -> int:
    own = own_minor()
    others = {
        minor: interpreter for minor, interpreter in newest_of_each_minor().items() if minor != own
    }
    missing = [minor for minor in MINORS if minor != own and minor not in others]

    # Run all of them even if one fails: the developer first wants to know which ones fail.
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
