"""Generate the classes of `banksman.threads` from the async classes.

    .venv/bin/python tools/blocking_api.py            # writes the files
    .venv/bin/python tools/blocking_api.py --check    # exits with 1 if a file is out of date

Each signature is thereby written only once. A generated method has the parameters, the overloads
and the docstring of the async method. Its body calls the async method in the loop and waits. The
tables below list the methods, and how a call behaves when its host closes. `threads/blocking.py`
has the methods that do more. A method with a `timeout` that the async method lacks declares it
here.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from banksman.commands.command import Command
from banksman.host import Host
from banksman.sessions.session import Session
from banksman.sessions.turn import Turn

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "src" / "banksman" / "threads"
PACKAGE = "banksman.threads"

# Width of a docstring line: 100 without the indentation.
DOC_COLUMNS = 92

# Names that mean the blocking object in a generated signature, with their modules.
FACES = {
    **dict.fromkeys(("Turn", "Session"), f"{PACKAGE}.blocking_session"),
    "Command": f"{PACKAGE}.blocking_command",
    "OutputReader": f"{PACKAGE}.blocking",
}
# Names that method bodies use, with their modules.
HELPERS = {
    **dict.fromkeys(("BlockingWrapper", "BlockingHold", "Reader", "behind"), f"{PACKAGE}.blocking"),
    **dict.fromkeys(("BlockingCommand", "BlockingHost", "BlockingSession"), f"{PACKAGE}.blocking"),
    **dict.fromkeys(("close_unused", "stop_untaken"), f"{PACKAGE}.blocking"),
    "CallPolicy": f"{PACKAGE}.thread_call",
    "AbstractContextManager": "contextlib",
    **dict.fromkeys(("cast", "overload"), "typing"),
    "explicit": "banksman.commands.options",
    "Finished": "banksman.commands.result",
    "Outcome": "banksman.core.session.outcome",
}
ASYNC_NAMES = {
    "AsyncTurn": "from banksman.sessions.turn import Turn as AsyncTurn",
    "AsyncSession": "from banksman.sessions.session import Session as AsyncSession",
    "AsyncCommand": "from banksman.commands.command import Command as AsyncCommand",
    "AsyncHost": "from banksman.host import Host as AsyncHost",
}


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """One generated method.

    - `policy`: see `CallPolicy`.
    - `timeout`: adds a parameter of this name.
    - `like`: the async method with the same signature, if its name differs.
    - `returns`: replaces the result type of the async method.
    - `calls`: replaces the call of the async method.
    - `through`: function that is called with that call as its argument.
    - `undo`: see `LoopThread.call`.
    - `doc`: replaces the docstring of the async method. `note`: adds a paragraph to it.
    """

    name: str
    policy: str = ""
    timeout: bool = False
    like: str = ""
    returns: str = ""
    calls: str = ""
    through: str = ""
    undo: str = ""
    doc: str = ""
    note: str = ""


@dataclass(frozen=True)
class PropertySpec:
    """One generated property.

    `kind`: type, for an attribute without an annotation. `looks`: the thread of the loop changes
    the value, so it is read there. `value`: replaces the expression.
    """

    name: str
    kind: str = ""
    looks: bool = False
    value: str = ""


@dataclass(frozen=True)
class ClassSpec:
    """One generated class: its name, base class, async class, docstring and members."""

    name: str
    base: str
    source: type
    doc: str
    members: tuple[PropertySpec | MethodSpec, ...]


def acts(*names: str) -> tuple[MethodSpec, ...]:
    return tuple(MethodSpec(name=name) for name in names)


def reads(*names: str) -> tuple[MethodSpec, ...]:
    return tuple(MethodSpec(name=name, policy="READS") for name in names)


TURN = ClassSpec(
    "Turn",
    "BlockingWrapper[AsyncTurn]",
    Turn,
    "An accepted ask: `for update in turn` yields its updates, `turn.outcome()` its outcome.",
    (
        PropertySpec("id", "str"),
        PropertySpec(
            "session",
            "Session",
            value="Session(self._bridge, cast(AsyncSession, self._inner.session))",
        ),
        PropertySpec("state", looks=True),
        MethodSpec(
            name="outcome",
            policy="READS",
            timeout=True,
            note="After `timeout` seconds: TimeoutError. The turn continues.",
        ),
        MethodSpec(name="__iter__", like="__aiter__"),
        *acts("interrupt", "edit"),
        *reads("said"),
    ),
)
SESSION = ClassSpec(
    "Session",
    "BlockingSession",
    Session,
    "One conversation with one agent. `Host.open` returns it.",
    (
        PropertySpec("id", "str"),
        PropertySpec("name", "str | None"),
        PropertySpec("agent", "str"),
        PropertySpec("is_closed"),
        MethodSpec(
            name="ask",
            timeout=True,
            undo="self._inner.let_go",
            note="Withdraws the ask on Ctrl-C, or if it is not accepted within `timeout` seconds.",
        ),
        MethodSpec(
            name="ask_and_wait",
            like="ask",
            returns="Outcome",
            timeout=True,
            through="self._wait_outcome",
            doc="Ask for one turn, and wait for its outcome. The parameters are those of `ask`.",
            note="If there is no outcome within `timeout` seconds (TimeoutError), or on Ctrl-C, "
            "the ask is withdrawn, or interrupted if it runs. This method does not wait for that.",
        ),
        *acts("interrupt", "move", "reorder", "edit", "withdraw", "hold", "follow"),
        *acts("begin_hold", "wait_hold", "end_hold"),
        *reads("questions", "open_questions"),
        *acts("answer", "set_model", "set_permission_mode", "share"),
        *reads("turn", "status", "look", "head", "page", "last_frames", "page_before", "stderr"),
        *acts("rename", "close", "close_nowait", "leave"),
        *reads("wait_closed"),
    ),
)
COMMAND = ClassSpec(
    "Command",
    "BlockingCommand",
    Command,
    "A started command. `Host.start` returns it.",
    (
        PropertySpec("id", "str"),
        PropertySpec("argv", "tuple[str, ...]"),
        PropertySpec("pid"),
        PropertySpec("finished", "Finished | None"),
        PropertySpec("is_over"),
        PropertySpec("state", looks=True),
        PropertySpec("stdout"),
        PropertySpec("stderr"),
        *reads("result"),
        *acts("stop_nowait", "signal"),
        *reads("read", "watch"),
        *acts("write", "close_stdin", "resize"),
    ),
)
HOST = ClassSpec(
    "Host",
    "BlockingHost",
    Host,
    "Owner of sessions and commands, with an event loop in a separate thread: see `banksman.Host`."
    "\n\nUse `with Host() as host`, or call `close()`. Otherwise the host closes when the program"
    "\nends, after all its threads have ended.",
    (
        MethodSpec(name="__init__"),
        MethodSpec(name="finish", policy="FOLLOWS"),
        *reads("session", "sessions"),
        MethodSpec(name="open", undo="close_unused"),
        MethodSpec(name="fork", undo="close_unused"),
        *acts("delete", "export", "import_session", "bundle"),
        *reads("read_many", "usage"),
        *acts("take_up", "take_up_held"),
        MethodSpec(name="start", undo="stop_untaken", note="Ctrl-C during the wait does the same."),
        *reads("commands", "command"),
        MethodSpec(
            name="take_ended", policy="READS", calls="self._take_ended", undo="self._return_reports"
        ),
        MethodSpec(
            name="wait_ended",
            policy="WAITS",
            timeout=True,
            calls="self._wait_ended",
            undo="self._return_reports",
            note="After `timeout` seconds: TimeoutError.",
        ),
    ),
)
MODULES = {
    "blocking_session": (
        "Blocking `Session` and `Turn` for threads, around the async classes of `sessions/`.",
        (TURN, SESSION),
    ),
    "blocking_command": (
        "Blocking `Command` for threads, around the async class of `commands/command.py`.",
        (COMMAND,),
    ),
    "blocking_host": (
        "Blocking `Host` for threads, around the async class of `banksman/host.py`.",
        (HOST,),
    ),
}
NOTICE = """\
Generated by `make blocking` (tools/blocking_api.py). Do not edit. Each method calls the async
method in the thread of the event loop and waits for it. `blocking.py` has the methods that do more,
and `loop_thread.py` has the thread."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


# ── Reading the async classes ──
@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def definitions(source: type, name: str) -> tuple[str, list[Function]]:
    """Return the module that defines a method, and its definitions: overloads first."""
    owner = next(each for each in source.__mro__ if name in vars(each))
    tree = tree_of(owner.__module__)
    (found,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__
    )
    nodes = [node for node in found.body if isinstance(node, Function) and node.name == name]
    assert nodes, f"{owner.__name__}.{name} is written elsewhere"
    return owner.__module__, nodes


def import_of(module: str, name: str) -> str | None:
    """Return the import line that gives a name of this module the same meaning elsewhere."""
    if hasattr(builtins, name):
        return None
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    origin = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                    return f"{origin}import {ast.unparse(alias)}"
    return f"from {module} import {name}"


def doc_of(node: Function, doc: str = "", note: str = "") -> list[str]:
    paragraphs = (doc or ast.get_docstring(node) or "").split("\n\n")
    paragraphs = [as_blocking(each) for each in (*paragraphs, note) if each]
    return "\n\n".join(paragraphs).splitlines()


def as_blocking(paragraph: str) -> str:
    text = re.sub(r"\bawait\s+", "", paragraph).replace("async for", "for")
    if text == paragraph and max(map(len, text.splitlines())) <= DOC_COLUMNS:
        return text
    return textwrap.fill(text, DOC_COLUMNS, break_on_hyphens=False)


# ── Writing the blocking classes ──
class GeneratedModule:
    def __init__(self, name: str, doc: str, faces: tuple[ClassSpec, ...]) -> None:
        self._imports: set[str] = set()
        classes = "\n\n\n".join("\n".join(self._class(face)) for face in faces)
        names = {
            each: f"from {home} import {each}"
            for each, home in (HELPERS | FACES).items()
            if home != f"{PACKAGE}.{name}"
        }
        names |= ASYNC_NAMES
        # Docstrings do not count: one that says "behind" needs no import of `behind`.
        code = re.sub(r'""".*?"""', "", classes, flags=re.DOTALL)
        self._imports |= {line for each, line in names.items() if re.search(rf"\b{each}\b", code)}
        head = f'"""{doc}\n\n{NOTICE}\n"""'
        lines = [head, "from __future__ import annotations", *sorted(self._imports), classes]
        self.text = tidied("\n".join(lines) + "\n", f"{name}.py")

    def _class(self, face: ClassSpec) -> Iterator[str]:
        yield f"class {face.name}({face.base}):"
        yield from indented(quoted(face.doc.splitlines()), 1)
        for member in face.members:
            if isinstance(member, PropertySpec):
                yield from indented(self._property(face.source, member), 1)
            else:
                yield from indented(self._method(face.source, member), 1)

    def _need(self, module: str, *nodes: ast.AST | None) -> None:
        for name in (
            each.id
            for node in nodes
            if node
            for each in ast.walk(node)
            if isinstance(each, ast.Name)
        ):
            if name not in FACES | HELPERS and (line := import_of(module, name)) is not None:
                self._imports.add(line)

    def _property(self, source: type, attribute: PropertySpec) -> Iterator[str]:
        kind, doc = attribute.kind, list[str]()
        if not kind:
            module, (node,) = definitions(source, attribute.name)
            self._need(module, node.returns)
            assert node.returns is not None
            kind, doc = ast.unparse(node.returns), doc_of(node)
        value = attribute.value or f"self._inner.{attribute.name}"
        if attribute.looks:
            value = f"self._bridge.look(lambda: {value})"
        elif kind in FACES and not attribute.value:
            value = f"{kind}(self._bridge, {value})"
        yield from ("@property", f"def {attribute.name}(self) -> {kind}:")
        yield from indented([*quoted(doc), f"return {value}"], 1)

    def _method(self, source: type, member: MethodSpec) -> Iterator[str]:
        module, (*overloads, node) = definitions(source, member.like or member.name)
        for each in overloads:
            yield from ("@overload", f"{self._head(module, each, member)} ...")
        if any(
            isinstance(each, ast.Name) and each.id == "explicit" for each in node.decorator_list
        ):
            yield "@explicit"
        yield self._head(module, node, member)
        yield from indented(
            [*quoted(doc_of(node, member.doc, member.note)), *body(node, member)], 1
        )

    def _head(self, module: str, node: Function, member: MethodSpec) -> str:
        parameters = copy.deepcopy(node.args)
        if member.timeout:
            parameters.kwonlyargs.append(
                ast.arg("timeout", ast.parse("float | None", mode="eval").body)
            )
            parameters.kw_defaults.append(ast.Constant(None))
        self._need(module, parameters)
        returns = member.returns or result(node)
        self._need(module, ast.parse(returns))
        return f"def {member.name}({ast.unparse(parameters)}) -> {returns}:"


def result(node: Function) -> str:
    assert node.returns is not None
    items = re.fullmatch(r"AsyncGenerator\[(.*)\]", ast.unparse(node.returns))
    if items is None:
        return ast.unparse(node.returns)
    return f"AbstractContextManager[{items[1]}]" if is_hold(node) else f"Reader[{items[1]}]"


def is_hold(node: Function) -> bool:
    return any(
        isinstance(each, ast.Name) and each.id == "asynccontextmanager"
        for each in node.decorator_list
    )


def arguments(node: Function) -> str:
    """Return the arguments for the async method, with blocking objects unwrapped."""
    given = node.args
    words = [behind_face(each) for each in given.args[1:]]
    words += [f"{each.arg}={behind_face(each)}" for each in given.kwonlyargs]
    words += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return ", ".join(words)


def behind_face(parameter: ast.arg) -> str:
    assert parameter.annotation is not None
    names = {each.id for each in ast.walk(parameter.annotation) if isinstance(each, ast.Name)}
    if "Turn" in names:
        return f"behind({parameter.arg})"
    if "Session" in names:
        return f"{parameter.arg} if isinstance({parameter.arg}, str) else {parameter.arg}.id"
    return parameter.arg


def body(node: Function, member: MethodSpec) -> Iterator[str]:
    method, words = member.calls or f"self._inner.{node.name}", arguments(node)
    if member.name == "__init__":
        yield f"super().__init__(AsyncHost({words}))"
        return
    returns = member.returns or result(node)
    if returns.startswith(("Reader[", "AbstractContextManager[")):
        kind = "BlockingHold" if is_hold(node) else "Reader"
        yield f"return {kind}(self._bridge, {method}({words}))"
        return
    work = f"lambda: {method}({words})" if words else method
    if member.through:
        work = f"lambda: {member.through}({work})"
    # Both ways go through the loop. A method that never waits may also be called in the thread of
    # the loop.
    waits = isinstance(node, ast.AsyncFunctionDef) or bool(member.calls)
    way, usual = ("call", "ACTS") if waits else ("look", "READS")
    policy = member.policy or "ACTS"
    extra = [f"CallPolicy.{policy}"] if policy != usual else []
    extra += ["timeout=timeout"] if member.timeout else []
    extra += [f"undo={member.undo}"] if member.undo else []
    yield from returned(f"self._bridge.{way}({', '.join([work, *extra])})", returns)


def returned(call: str, kind: str) -> Iterator[str]:
    """Wrap the result in a blocking object."""
    many = re.fullmatch(r"list\[(\w+)\]", kind)
    if kind == "None":
        yield call
    elif kind in FACES:
        yield f"return {kind}(self._bridge, {call})"
    elif many and many[1] in FACES:
        yield f"return [{many[1]}(self._bridge, each) for each in {call}]"
    elif kind == "Command | Finished":
        yield f"started = {call}"
        yield "return started if isinstance(started, Finished) else Command(self._bridge, started)"
    else:
        yield f"return {call}"


def quoted(doc: list[str]) -> list[str]:
    if not doc:
        return []
    return [f'"""{doc[0]}"""'] if len(doc) == 1 else [f'"""{doc[0]}', *doc[1:], '"""']


def indented(lines: Iterator[str] | list[str], depth: int) -> Iterator[str]:
    for line in lines:
        for each in line.split("\n"):
            yield "    " * depth + each if each else ""


def tidied(text: str, name: str) -> str:
    """Format as `make check` requires: sort the imports, wrap the lines."""
    for words in (["check", "--select", "I", "--fix"], ["format"]):
        ruff = [
            sys.executable,
            "-m",
            "ruff",
            *words,
            "--quiet",
            "--stdin-filename",
            str(FOLDER / name),
            "-",
        ]
        text = subprocess.run(
            ruff, input=text, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
        ).stdout
    return text


def generated() -> dict[Path, str]:
    return {
        FOLDER / f"{name}.py": GeneratedModule(name, doc, faces).text
        for name, (doc, faces) in MODULES.items()
    }


def main(words: list[str]) -> int:
    texts = generated()
    if words == ["--check"]:
        stale = [
            path
            for path, text in texts.items()
            if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run `make blocking`", file=sys.stderr)
        return bool(stale)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
