"""Check the user's settings: readable, valid for a server, private, no unknown variables."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from banksman import config
from banksman.cli.doctor import Check, DoctorOptions, Finding, note, ok, wrong
from banksman.errors import UsageError


def checks(_: DoctorOptions) -> list[Check]:
    return [settings, file_mode, variables]


def settings() -> Iterator[Finding]:
    """Check that the settings can be read and that a server accepts them."""
    found = config.load()
    set_here = sum(one.is_set for one in found)
    is_there = found.place.path.exists()
    where = f"{found.place.path}{'' if is_there else ' (does not exist, and is not required)'}"
    yield ok("settings", f"{where}, {set_here} of {len(config.KEYS)} keys are set")
    try:
        from banksman.server import server_settings as of_server  # noqa: PLC0415
    except ModuleNotFoundError:
        # The check of the packages reports this.
        return
    try:
        of_server.of(found)
    except UsageError as exc:
        yield wrong("server settings", exc.args[0], exc.hint or "run `banksman config show`")


def file_mode() -> Iterator[Finding]:
    """Check that other users cannot change the settings file, nor read secrets in it."""
    path = config.chosen_path().path
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    if mode & 0o022:
        yield wrong(
            "settings file", f"other users can change {path} (mode {mode:o})", f"chmod go-w {path}"
        )
    secrets = [
        one.key.name
        for one in config.load()
        if one.key.is_secret and one.value and one.origin == str(path)
    ]
    if secrets and mode & 0o044:
        yield wrong(
            "settings file",
            f"other users can read {', '.join(secrets)} in {path}",
            f"chmod 600 {path}",
        )


def variables() -> Iterator[Finding]:
    """Report `BANKSMAN_*` variables that no key defines."""
    for stray in config.strays():
        yield note("variables", f"unknown variable {stray.name}", stray.hint)
