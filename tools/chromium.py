"""Finds Chromium for the browser tests; where there is none, and it may, installs Debian's package.

    python3 tools/chromium.py        prints where it is
    CHROMIUM=/path/to/chromium …     that one, and no other

See debian.py: afterwards there is one, or somebody was told loudly that there is none and what to do about it.
"""

import os
import shutil
import sys

import debian

NAMES = ("chromium", "chromium-browser", "google-chrome")
PACKAGE = "chromium"


def find() -> "str | None":
    """The path of a Chromium: the one that `CHROMIUM` names, if it is set, else the first one on PATH."""
    named = os.environ.get("CHROMIUM")
    for name in (named,) if named else NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    return None


def install() -> str:
    """Why there is none; empty: there is one now."""
    if os.environ.get("CHROMIUM"):
        return f"CHROMIUM names {os.environ['CHROMIUM']!r}, which is no program."
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
        f"NO CHROMIUM, SO THE BROWSER TESTS ARE NOT RUN. {why}",
        "Debian, Ubuntu:  sudo apt-get install chromium",
        "or name one:     CHROMIUM=/path/to/chromium make test",
    )


if __name__ == "__main__":
    sys.exit(main())
