"""The agents that are known, and what of them is on this machine. Looked at, and nothing started."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Any

from banksman.errors import UsageError
from banksman.sessions import profiles
from banksman.sessions.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledAgent:
    """`profile` None: its file is wrong, and `error` says how. `path`: where its program is, None: not found. `source`:
    the user's file that it is from; None: it comes with the package. `overrides`: one of ours has that name too."""

    name: str
    profile: Profile | None
    error: str | None
    path: str | None
    source: str | None
    overrides: bool

    def facts(self) -> dict[str, Any]:
        """All of it in words and lists, as clients of the server and of the command line get it."""
        profile = self.profile
        known: dict[str, Any] = {"command": [], "dialect": "", "capabilities": []}
        if profile is not None:
            known = {
                "title": profile.title,
                "command": list(profile.command),
                "dialect": profile.dialect.name,
                "capabilities": sorted(profile.capabilities),
                "install": profile.install,
                "website": profile.website,
                "repairs": profile.repairs(),
                "note": profile.note,
            }
        where = {"source": self.source, "overrides": self.overrides, "error": self.error}
        return {"name": self.name, "found": self.path is not None, "path": self.path, **known, **where}


def look(only: str | None = None) -> list[InstalledAgent]:
    """All of them, by name, or one. A file that is wrong is told in its place, and hides no other."""
    users, ours = profiles.users(), profiles.ours()
    if only is None:
        wanted = sorted({*users, *ours})
    elif only in users:
        wanted = [only]
    else:
        wanted = [profiles.load(only).name]  # Or the error that names those that are known.
    found: list[InstalledAgent] = []
    for name in wanted:
        profile, error = _load(name)
        found.append(
            InstalledAgent(
                name=name,
                profile=profile,
                error=error,
                path=None if profile is None else _path(profile),
                source=str(users[name]) if name in users else None,
                overrides=name in users and name in ours,
            )
        )
    return found


def _load(name: str) -> tuple[Profile | None, str | None]:
    try:
        return profiles.load(name), None
    except UsageError as exc:
        return None, str(exc)


def _path(profile: Profile) -> str | None:
    if not profile.command:
        return None
    path = shutil.which(profile.command[0])
    # A command may name a program by a path, and that of a folder is told as whole as that of PATH.
    return None if path is None else os.path.abspath(path)
