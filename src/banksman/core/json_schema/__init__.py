"""JSON Schema for turn results and tool inputs: `check` a schema, then get the `fault` of a value.

**Guarantees.** `check` refuses a schema with an unknown keyword, and names its place, before
anything starts. Therefore every keyword of an accepted schema is applied. `fault` returns a result
for every value. No value is too deep, too large or too odd, and none makes it raise.

**Dialect.** 2020-12, plus `definitions` of older drafts. A `$ref` may appear beside other keywords.
It leads to the root or to one of its definitions, never out of the schema. `format` and other
annotations are ignored.

**Termination.** A value comes from an agent, which may be hostile. A schema comes from the caller.
Therefore the depth of the value is checked first, without recursion, and every later recursion
follows the value or the schema. A schema that leads back to itself without descending in the value
is refused. A schema that visits each part of a value twice still doubles the work with each level,
so the steps are counted.

Patterns are matched without backtracking: see regex.py.

**Layers.** json_value.py knows JSON but no schema. regex.py knows text but no JSON. validator.py
checks a schema, and then values against it. Each module imports only modules named before it.
"""

from __future__ import annotations

from banksman.core.json_schema.json_value import STEPS_MAX, VALUE_DEPTH_MAX
from banksman.core.json_schema.validator import NESTED_MAX, SCHEMA_DEPTH_MAX, check, fault

__all__ = ["NESTED_MAX", "SCHEMA_DEPTH_MAX", "STEPS_MAX", "VALUE_DEPTH_MAX", "check", "fault"]
