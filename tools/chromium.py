"""Find Chromium for the browser tests; install Debian's package if it is missing and allowed.

    python3 tools/chromium.py        prints its path
    CHROMIUM=/path/to/chromium …     uses this program and no other

Afterwards Chromium exists, or a loud message names the missing program and how to install it (see
debian.py).
"""

import os
import shutil
import sys

import debian

NAMES = ("chromium", "chromium-browser", "google-chrome")
PACKAGE = "chromium"


def find() -> "str | None":
    """Return the path of Chromium: the program that `CHROMIUM` names, else the first on PATH."""
    named = os.environ.get("CHROMIUM")
    for name in (named,) if named else NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    return None


def install() -> str:
    """Install Chromium and return the error; empty on success."""
    if os.environ.get("CHROMIUM"):
        return f"CHROMIUM is {os.environ['CHROMIUM']!r}, which is not a program."
    return debian.why_not() or debian.install(PACKAGE)


def main() -> int:
    found = find()
    why = ""
    if found is None:
        why = install()
        found = find()
    if found is not None:
        print(found)
        return 0
    return debian.say_loudly(
        f"NO CHROMIUM: THE BROWSER TESTS ARE SKIPPED. {why}",
        "Debian, Ubuntu:  sudo apt-get install chromium",
        "another path:    CHROMIUM=/path/to/chromium make test",
    )


if __name__ == "__main__":
    sys.exit(main())
