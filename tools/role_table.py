#!/usr/bin/env python3
"""Write the tables of roles and of routes into docs/security.md, from what the server enforces.

.venv/bin/python tools/role_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from banksman.server.access import roles
from banksman.server.access.roles import Action
from banksman.server.app import SERVED

PAGE = Path(__file__).resolve().parent.parent / "docs" / "security.md"
# Stands for the path of a session.
SESSION = ("/v1/sessions/{id}", "…")
_PLACE = r"(<!-- {}: [^\n]*-->\n\n)(?:\|[^\n]*\n)*\n?"


def routes() -> str:
    """Return the table of the routes by their actions, without the files of the page."""
    rows = [["action", "routes"], ["---"] * 2]
    for action in Action:
        named = [
            f"`{route.method} {route.path.replace(*SESSION)}`"
            for route in SERVED
            if route.action is action and not route.path.startswith("/page/")
        ]
        rows.append([action.value, ", ".join(named)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(page: str) -> str:
    """Return the page with the present tables."""
    for name, table in (("roles", roles.table()), ("routes", routes())):
        page, count = re.subn(
            _PLACE.format(name), lambda match, table=table: f"{match[1]}{table}\n", page
        )
        assert count == 1, f"the page has one place for the table of {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
