"""docs/conformance.md, made from one run of the matrix: which agent does what, and what Banksman repairs.

The layout and all that is not measured come from the code, so that two runs differ in times alone, unless an agent or
Banksman has become another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.agents.agents import AGENTS
from tests.agents.matrix.abilities import NAMES
from tests.agents.matrix.steps import STEPS
from tests.agents.matrix.table import SIDES, Cell, in_all, ordered
from tools.agents import PINS, pinned_versions

from banksman.run.sessions import profiles
from banksman.run.sessions.profile import CAPABILITIES, Profile
