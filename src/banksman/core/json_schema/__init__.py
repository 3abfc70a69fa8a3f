"""JSON Schema for the result of a turn and the input of a tool: `check` a schema, then ask for the `fault` of a value.

**What is promised.** `check` refuses a schema with an unknown keyword, and names its place, before anything is started.
So every keyword of a schema that passed is applied. `fault` answers for every value: none is too deep, too large or too
odd, and none makes it raise.

**Which dialect.** 2020-12, and `definitions` of older drafts. A `$ref` may stand beside other keywords. It leads to the
root or to one of its definitions, never out of the schema. `format` and other annotations are ignored.

**Why it ends.** A value comes from an agent, which may be hostile; a schema comes from the caller. So the depth of the
value is checked first, without recursion, and every later recursion follows the value or the schema. A schema that
leads back to itself without going down in the value is refused. A schema that looks at each part of a value twice still
doubles the work with each level, so the steps are counted.

Patterns are matched without backtracking: see regex.py.

**Layers.** json_value.py knows JSON but no schema, regex.py knows text but no JSON. validator.py checks a schema, and
then values against it. Each imports only those named before it.
"""

from __future__ import annotations

from banksman.core.json_schema.json_value import STEPS_MAX, VALUE_DEPTH_MAX
from banksman.core.json_schema.validator import NESTED_MAX, SCHEMA_DEPTH_MAX, check, fault

__all__ = ["NESTED_MAX", "SCHEMA_DEPTH_MAX", "STEPS_MAX", "VALUE_DEPTH_MAX", "check", "fault"]
