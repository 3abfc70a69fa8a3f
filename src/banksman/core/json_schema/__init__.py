"""JSON Schema, as far as the result of a turn and the input of a tool need it: `check` a schema, then `fault` a value.

**What is promised.** A schema that passes `check` is held to in full: no keyword is skipped because it is not known
here. One that could not be held to is refused with the keyword's place, before anything was started. `fault` gives an
answer to every value: nothing in it is too deep, too large or too odd, and none makes it raise.

**Which dialect.** 2020-12, and from before it `definitions`. A `$ref` stands beside other keywords and leads to the
root or to one of its definitions, never out of the schema. `format` and its like are annotations there, and here.

**Why it ends.** A value comes from an agent, which may be hostile; a schema comes from the caller. So the value's depth
is looked at before anything else, without recursion, and all that recurses afterwards follows the value or the schema.
A schema that leads back to itself without going down in the value is refused. What is left is a schema that looks at
each part of a value twice, at each depth: that doubles with the depth, and the steps are counted.

A pattern is followed in all its ways at once, and not in one after the other: see regex.py.

**Where it stands.** json_value.py knows JSON and no schema, regex.py a text and no JSON; schema_check.py knows schemas
and no value; validator.py brings them together. Each imports only those named before it.
"""

from __future__ import annotations

from banksman.core.json_schema.json_value import STEPS_MAX, VALUE_DEPTH_MAX
from banksman.core.json_schema.schema_check import SCHEMA_DEPTH_MAX, check
from banksman.core.json_schema.validator import NESTED_MAX, fault

__all__ = ["NESTED_MAX", "SCHEMA_DEPTH_MAX", "STEPS_MAX", "VALUE_DEPTH_MAX", "check", "fault"]
