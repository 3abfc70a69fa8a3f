#!/usr/bin/env python3
"""Write the table of roles into docs/security.md, from the rights that the server enforces.

.venv/bin/python tools/role_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from banksman.server.access import roles

PAGE = Path(__file__).resolve().parent.parent / "docs" / "security.md"
_PLACE = re.compile(r"(<!-- roles: [^\n]*-->\n\n)(?:\|[^\n]*\n)*\n?")


def with_table(page: str) -> str:
    """Return the page with the present table."""
    written, count = _PLACE.subn(lambda match: f"{match[1]}{roles.table()}\n", page)
    assert count == 1, "the page has one place for the table"
    return written


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
