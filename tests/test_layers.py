"""The layer rule: which part of the package may import which, read from the source of every file.

The core is pure because it cannot reach the world. The shell can be replaced because no part below it knows it. Both
properties need a complete check, so every import counts: inside a function, under `if TYPE_CHECKING`, relative, and in
any spelling. The check does not see a module that a string names (`importlib.import_module`). The core cannot use that
function, because it may not import `importlib`.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"

# The pure modules of the standard library: values in, values out. No clock, loop, thread, file, logger or random.
PURE = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "re",
    "typing",
}
# The builtins that reach the world, or a module, without an import.
IMPURE_BUILTINS = {"__import__", "breakpoint", "eval", "exec", "input", "open", "print"}

# The modules of the package that each part may import. A name stands for the module and everything below it. A folder
# of a part may have a separate line. A part that is not listed is an error, so a new part needs a line here first.
# `banksman.__init__` stands for the public names of the package.
EVERYTHING = ("banksman",)
_CORE = ("banksman.errors", "banksman.core")
# Inside the core, each package may import those before it, so no call comes back to the package that made it.
_WIRE = ("banksman.errors", "banksman.core.wire")
_JSON_SCHEMA = (*_WIRE, "banksman.core.json_schema")
_DIALECTS = (*_JSON_SCHEMA, "banksman.core.dialects")
_SESSION = (*_DIALECTS, "banksman.core.process_facts", "banksman.core.session")
# Common modules for all parts above the core: tasks and their owners, the dispatcher, the user's folders.
_TOOLS = ("banksman.tasks", "banksman.dispatcher", "banksman.folders", "banksman.histogram")
_PROCESS = (*_CORE, *_TOOLS, "banksman.sockets", "banksman.process")
_COMMANDS = (*_PROCESS, "banksman.commands")
# The protocol of a log, which a caller above passes in, and its values, but no engine.
_SESSIONS = (*_COMMANDS, "banksman.sessions", "banksman.store.log", "banksman.store.log_values")
_RUNTIME = (*_SESSIONS, "banksman.runtime")
_SERVER = (
    *(*_RUNTIME, "banksman.sockets", "banksman.config", "banksman.server", "banksman.__init__"),
    # The parser for the address of a shared store, the interfaces between its hosts, and this host as a cluster member.
    *(
        "banksman.cluster.store_address",
        "banksman.cluster.interfaces",
        "banksman.cluster.host",
        "banksman.cluster.http",
    ),
)
BANKSMAN = {
    "errors": (),
    "dispatcher": (),
    "folders": ("banksman.errors",),
    "histogram": (),
    "sockets": ("banksman.errors",),
    "tasks": (),
    "config": ("banksman.errors", "banksman.folders", "banksman.config"),
    "core": ("banksman.errors", "banksman.core.process_facts", "banksman.core.stop_ladder"),
    "core/wire": _WIRE,
    "core/json_schema": _JSON_SCHEMA,
    "core/dialects": _DIALECTS,
    "core/session": _SESSION,
    "core/redaction": (*_WIRE, "banksman.core.session", "banksman.core.redaction"),
    "store": (*_CORE, "banksman.tasks", "banksman.histogram", "banksman.store"),
    "process": _PROCESS,
    # A command line without an event loop: it needs the keeper, and nothing above the process layer.
    "guard": ("banksman.errors", "banksman.process", "banksman.guard"),
    "commands": _COMMANDS,
    "sessions": _SESSIONS,
    "runtime": _RUNTIME,
    # A drop-in: an interface of another library on the commands of the default host.
    "claude_sdk": (*_RUNTIME, "banksman.claude_sdk"),
    # A store that many hosts share is an engine like the others. The host as a cluster member is above sessions. The
    # code that forwards requests is a part of the server.
    "cluster": (*_CORE, "banksman.tasks", "banksman.histogram", "banksman.store", "banksman.cluster"),
    "cluster/log": (*_CORE, "banksman.tasks", "banksman.histogram", "banksman.store", "banksman.cluster"),
    "cluster/host": (*_RUNTIME, "banksman.cluster.interfaces", "banksman.cluster.host"),
    "cluster/http": _SERVER,
    "server": _SERVER,
    "cli": (
        *(*_RUNTIME, "banksman.sockets", "banksman.config", "banksman.cli", "banksman.__init__", "banksman.guard"),
        # `doctor` reads the file directly. Opening it as a host does would change it.
        *("banksman.store.sqlite.store_health", "banksman.cluster.log.cluster_health"),
        "banksman.cluster.log.store_check",
        "banksman.cluster.store_address",
        # One verb starts the server. The other verbs start an embedded one if no server runs.
        *("banksman.server.main", "banksman.server.embedded", "banksman.server.server_settings"),
        # One verb works on the file of named tokens, which needs no server.
        *("banksman.server.access.named_tokens", "banksman.server.access.roles"),
    ),
    # The drop-ins for asyncio and for the ACP package.
    "asyncio": (*_RUNTIME, "banksman.asyncio"),
    "acp": ("banksman.errors", "banksman.asyncio"),
    "testing": EVERYTHING,
    "__init__": EVERYTHING,
    "__main__": EVERYTHING,
    "demo": EVERYTHING,
    # The host passes the engines in.
    "host": EVERYTHING,
    "threads": EVERYTHING,
}
# The server and the command line know the core only through sessions and commands. The exception: an editor speaks
# JSON-RPC to the command line, and there must be only one JSON-RPC reader.
WITHOUT = {
    "server": ("banksman.core",),
    "cluster/http": ("banksman.core",),
    "cli": ("banksman.core",),
}
EXCEPT = {"cli": ("banksman.core.wire.jsonrpc",)}
# Third-party packages, by the part or the folder that may import them. Every other part uses only the standard library,
# because a command needs nothing else.
THIRD_PARTY = {
    "claude_sdk": {"anyio", "claude_agent_sdk", "sniffio"},
    "config": {"msgspec"},
    "core": {"msgspec"},
    "store": {"msgspec"},
    "sessions": {"msgspec"},
    "cluster": {"msgspec"},
    "cluster/http": {"msgspec", "starlette"},
    "server": {"httptools", "msgspec", "opentelemetry", "prometheus_client", "starlette", "uvicorn"},
}
# Packages that only one file may import, so that a replacement of the package changes only that file.
ALONE = {
    "nats": "banksman/cluster/nats.py",
    "acp": "banksman/acp.py",
    "opentelemetry": "banksman/server/ops/telemetry.py",
}


def is_within(name: str, *places: str) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def imports(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Yield each imported name with its line, in full: `from a.b import c` is a.b.c, whether or not c is a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [name.name for name in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) - level + 1] if level else []
                base = ".".join([*above, *([module] if module else [])])
                modules = [f"{base}.{name.name}" for name in names]
            case _:
                continue
        for module in modules:
            root, _, rest = module.partition(".")
            # A name that is not a part of the package, as in `from banksman import execute`, is a public name.
            is_public_name = root == "banksman" and rest.partition(".")[0] not in BANKSMAN
            yield node.lineno, "banksman.__init__" if is_public_name else module


def refusal(part: str, module: str, place: str) -> str | None:
    """Return why this part of the package may not import the module, or None. `place`: the part, or a folder of it."""
    if is_within(module, "banksman.testing") and part != "testing":
        return f"nothing may import {module}"
    if is_within(module, "banksman"):
        allowed = is_within(module, *BANKSMAN[place]) and not is_within(module, *WITHOUT.get(place, ()))
        allowed = allowed or is_within(module, *EXCEPT.get(place, ()))
    else:
        package = module.partition(".")[0]
        at_hand = PURE if part == "core" else sys.stdlib_module_names
        allowed = package in at_hand or package in THIRD_PARTY.get(place, THIRD_PARTY.get(part, ()))
    return None if allowed else f"{place} may not import {module}"


def violations(path: str, source: str) -> list[str]:
    """Return the violations in one file. `path` is relative to the folder that contains the package."""
    names = path.removesuffix(".py").split("/")
    part = names[1]
    if part not in BANKSMAN:
        return [f"{path}: {part} has no place in tests/test_layers.py"]
    tree = ast.parse(source)
    folder = "/".join(names[1:3])
    place = folder if folder in BANKSMAN else part
    found = [
        (line, why)
        for line, module in imports(tree, names[:-1])
        if ALONE.get(module.partition(".")[0]) != path and (why := refusal(part, module, place))
    ]
    if part == "core":
        found += [
            (node.lineno, f"core may not use {node.id}()")
            for node in ast.walk(tree)
            # A field may have the name `input`. Only a load of the name reaches the builtin.
            if isinstance(node, ast.Name) and node.id in IMPURE_BUILTINS and isinstance(node.ctx, ast.Load)
        ]
    return [f"{path}:{line}: {why}" for line, why in sorted(found)]


def circle(sources: Mapping[str, str]) -> list[str]:
    """Return the modules of an import circle, or an empty list. The keys are paths, as for `violations`."""
    paths = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        names = (name for _, name in imports(ast.parse(sources[path]), path.split("/")[:-1]))
        # An imported name is a module, or a name in the module before its last dot.
        found = {name if name in paths else name.rpartition(".")[0] for name in names}
        graph[module] = (found & paths.keys()) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        return exc.args[1]
    return []


def test_no_module_is_in_an_import_circle() -> None:
    files = sorted(SOURCE.glob("banksman/**/*.py"))
    assert circle({file.relative_to(SOURCE).as_posix(): file.read_text() for file in files}) == []


@pytest.mark.parametrize(
    "back",
    ["from banksman.core import a", "from banksman.core.a import A", "if TYPE_CHECKING:\n from .a import A"],
)
def test_circle_is_found_however_it_closes(back: str) -> None:
    sources = {
        "banksman/core/__init__.py": "",
        "banksman/core/a.py": "from banksman.core import b",
        "banksman/core/b.py": "import banksman.core.c",
        "banksman/core/c.py": back,
    }
    assert set(circle(sources)) == {"banksman.core.a", "banksman.core.b", "banksman.core.c"}


def test_layers_follow_the_one_way_rule() -> None:
    files = sorted(SOURCE.glob("banksman/**/*.py"))
    # An empty list would pass, so check that a known file is among the files.
    assert SOURCE / "banksman" / "core" / "stop_ladder.py" in files
    broken = [line for file in files for line in violations(file.relative_to(SOURCE).as_posix(), file.read_text())]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "source", "why"),
    [
        ("core/a.py", "import time", "core may not import time"),
        ("process/a.py", "from banksman.commands import output", "process may not import banksman.commands.output"),
        ("commands/a.py", "from banksman.sessions import turn", "commands may not import banksman.sessions.turn"),
        ("sessions/a.py", "from banksman.runtime import execute", "sessions may not import banksman.runtime.execute"),
        ("core/a.py", "from os import path", "core may not import os.path"),
        ("core/a.py", "import enum, random", "core may not import random"),
        ("core/a.py", "def f():\n import asyncio", "core may not import asyncio"),
        ("core/a.py", "if TYPE_CHECKING:\n from threading import Lock", "core may not import threading.Lock"),
        ("core/a.py", "import pydantic", "core may not import pydantic"),
        ("core/a.py", "import banksman", "core may not import banksman.__init__"),
        ("core/a.py", "from ..process import launch", "core may not import banksman.process.launch"),
        ("core/dialects/a.py", "from ...store.log import Log", "core/dialects may not import banksman.store.log.Log"),
        ("core/dialects/a.py", "from .. import session", "core/dialects may not import banksman.core.session"),
        ("core/wire/a.py", "from .. import dialects", "core/wire may not import banksman.core.dialects"),
        ("core/session/a.py", "import banksman.core.redaction", "core/session may not import banksman.core.redaction"),
        ("core/__init__.py", "from .. import execute", "core may not import banksman.__init__"),
        ("core/a.py", "text = open('/proc/self/stat').read()", "core may not use open()"),
        ("errors.py", "from banksman.core import stop_ladder", "errors may not import banksman.core.stop_ladder"),
        ("store/a.py", "from banksman.cluster import nats", "store may not import banksman.cluster.nats"),
        ("runtime/a.py", "from banksman.store import sqlite", "runtime may not import banksman.store.sqlite"),
        ("sessions/a.py", "import banksman.cli.main as verbs", "sessions may not import banksman.cli.main"),
        ("runtime/a.py", "from banksman import Host", "runtime may not import banksman.__init__"),
        ("runtime/a.py", "import banksman.claude_sdk", "runtime may not import banksman.claude_sdk"),
        ("sessions/a.py", "import claude_agent_sdk", "sessions may not import claude_agent_sdk"),
        ("process/a.py", "import msgspec", "process may not import msgspec"),
        ("commands/a.py", "from msgspec import Struct", "commands may not import msgspec.Struct"),
        ("cluster/log/a.py", "import nats.errors", "cluster/log may not import nats.errors"),
        ("testing/a.py", "from nats.aio import client", "testing may not import nats.aio.client"),
        ("cli/a.py", "from banksman.core import stop_ladder", "cli may not import banksman.core.stop_ladder"),
        ("server/a.py", "from banksman.cli import main", "server may not import banksman.cli.main"),
        ("cluster/host/a.py", "from banksman.server import app", "cluster/host may not import banksman.server.app"),
        ("__init__.py", "from . import testing", "nothing may import banksman.testing"),
        ("demo.py", "def f():\n from .testing.world import World", "nothing may import banksman.testing.world.World"),
    ],
)
def test_layers_report_a_forbidden_import(path: str, source: str, why: str) -> None:
    line = source.count("\n") + 1
    assert violations(f"banksman/{path}", source) == [f"banksman/{path}:{line}: {why}"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/a.py", "import collections.abc, re, msgspec\nfrom collections import abc\nfrom ..errors import Refused"),
        ("core/dialects/a.py", "from . import acp\nfrom ..wire import framing\nfrom ...errors import AgentError"),
        ("store/a.py", "import sqlite3\nfrom banksman.core import stop_ladder\nfrom .log import Log"),
        ("cluster/nats.py", "import nats\nfrom nats.aio.client import Client"),
        (
            "runtime/a.py",
            "import os, time, _socket\nfrom banksman.store import log\nfrom banksman.store.log import Log",
        ),
        ("sessions/workspace/a.py", "from msgspec.structs import replace"),
        ("cli/a.py", "from banksman import execute\nfrom banksman.runtime import base_host\nimport banksman.errors"),
        ("testing/a.py", "from banksman.testing import sim\nfrom banksman import cli, store\nimport banksman"),
        ("__main__.py", "from banksman.cli import main"),
    ],
)
def test_layers_allow_a_permitted_import(path: str, source: str) -> None:
    assert violations(f"banksman/{path}", source) == []


def test_layers_require_a_place_for_a_new_part() -> None:
    assert violations("banksman/misc.py", "") == ["banksman/misc.py: misc has no place in tests/test_layers.py"]
