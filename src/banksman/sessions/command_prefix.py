"""Command prefixes: the sandboxes by name, the far ends, and the placeholders in their words.

A prefix is a command that runs the agent's command, such as `bwrap …`. In its words `{cwd}` is the
session's folder and `{session}` the session's id. `{command}` is the agent's whole command, quoted
for a shell. Without it the command's words follow the prefix, and quoted if the prefix is `ssh`:
ssh joins its words with spaces, and the shell at the far end splits them again.

**Text of a program.** A caller of a server may choose the folder, the model and the system prompt.
None of them must become a part of a program's text, such as `sh -c "mkdir {cwd}"`. Where it is
unknown how often and by which rules a text is parsed, a value that would need quotes is refused.

**The folder of a sandbox.** `bwrap` makes the session's folder writable. A folder of the kernel
(`/proc`, `/sys`) or the root folder would undo the sandbox, so they are refused. The folder may be
replaced by a link after this check, so the prefix mounts `/proc` and `/sys` over it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from banksman import folders
from banksman.errors import UsageError

_BWRAP_NAME = "bwrap"
# The file system is read-only but for the session's folder and a private /tmp. Processes outside
# are invisible. The network is the host's, because an agent needs its provider. With a capability,
# an agent of root could mount the file system again for writing. The settings of the kernel belong
# to root: by core_pattern or a control group it could run programs outside. The order counts: the
# folder may be /, or a link to /proc by now.
_BWRAP = (
    *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/tmp"),
    *("--bind", "{cwd}", "{cwd}", "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"),
    *("--ro-bind-try", "/proc/sysrq-trigger", "/proc/sysrq-trigger"),
    *("--ro-bind-try", "/sys", "/sys"),
    *("--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL", "--"),
)
# Only the processes outside are invisible. With a capability, an agent of root could unmount /proc
# and see them. setpriv itself needs the capabilities, also as another user than root.
_UNSHARE = (
    *("unshare", "--user", "--map-current-user", "--mount", "--pid", "--fork", "--mount-proc"),
    *("--keep-caps", "--", "setpriv", "--bounding-set=-all", "--inh-caps=-all"),
    *("--ambient-caps=-all", "--"),
)
SANDBOXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {_BWRAP_NAME: _BWRAP, "unshare": _UNSHARE}
)
_KERNEL_FOLDERS = ("/proc", "/sys")
# Prefixes to another machine and into a container: `ssh:HOST`, `docker:BOX`. What runs there is not
# below the keeper here, so a guard at the far end ends it (docs/how-to/guard.md).
_FAR = {
    "ssh": (
        *("ssh", "-T", "-o", "BatchMode=yes", "{far}"),
        "cd {cwd} && exec banksman guard -- {command}",
    ),
    "docker": (
        *("docker", "exec", "-i", "--workdir", "{cwd}", "{far}"),
        *("banksman", "guard", "--"),
    ),
}
# A name that begins with a dash would be an option.
_FAR_NAME = re.compile(rf"({'|'.join(_FAR)}):([^-\s\0][^\s\0]*)")
KNOWN = ", ".join((*SANDBOXES, *(f"{name}:NAME" for name in _FAR)))
_PLACEHOLDER = re.compile(r"\{(cwd|session|command)\}")
# What makes a word with a placeholder the text of a program: characters that mean something to a
# shell, or an option such as -c or -e before it or in it.
_TEXT = re.compile(r"[\s;&|<>()$`'\"\\#*?!]")
_TEXT_OPTION = re.compile(r"-\w*[ce]|--(command|eval|execute)")
_TEXT_OPTION_INSIDE = re.compile(r"--(command|eval|execute)=")
# Programs that join their words to the text of a shell. So does the `eval` of a shell.
_JOINERS = frozenset(("ssh", "autossh", "dbclient", "rsh"))
_EVAL = "eval"
_JOINER_INSIDE = re.compile(rf"(?:^|[\s;&|(/'\"`])({'|'.join((*sorted(_JOINERS), _EVAL))})(?=\s)")
# A word with options of ssh. Behind one of the letters is its value: the rest, or the next word.
_SSH_OPTIONS = re.compile(r"-[^BDEFIJLMOPQRSWbceilmopw]*(?:([BDEFIJLMOPQRSWbceilmopw])(.*))?", re.S)
# Their values may have the name of ssh (`-o "ProxyCommand ssh …"`), and no agent runs in them.
_OWN_VALUES = ("o", "e")
_QUOTES = re.compile(r"['\"`\\]")


def is_far(wrap: Any) -> bool:
    """Whether a sandbox is on another machine or in a container, with programs of its own."""
    return isinstance(wrap, str) and _FAR_NAME.fullmatch(wrap) is not None


def prefix(wrap: str | Sequence[str]) -> tuple[str, ...]:
    """Return the words of a prefix: those of a sandbox by name, or the given ones."""
    if not isinstance(wrap, str):
        return tuple(wrap)
    if (found := _FAR_NAME.fullmatch(wrap)) is None:
        return SANDBOXES[wrap]
    return tuple(found[2] if word == "{far}" else word for word in _FAR[found[1]])


def prefixed(
    wrap: str | Sequence[str], argv: Sequence[str], *, cwd: str, session: str, hides: bool
) -> list[str]:
    """Return the command behind its prefix. `hides`: whether a sandbox hides Banksman's files."""
    words = prefix(wrap)
    if wrap == _BWRAP_NAME:
        _check_writable(cwd)
        if hides:
            words = _hiding(words)
    if any("{command}" in word for word in words):
        return filled("wrap", words, cwd=cwd, session=session, argv=argv)
    return [*filled("wrap", words, cwd=cwd, session=session), *_following(words, argv)]


def filled(
    name: str, words: Sequence[str], *, cwd: str, session: str, argv: Sequence[str] = ()
) -> list[str]:
    """Fill the placeholders in one pass: a folder may be called {session}.

    A word with {command} is the text of a shell, so the folder is quoted there, too. In another
    text of a program, between quotes, and where two shells parse the text, a value that would need
    quotes is refused.
    """
    command = shlex.join(argv)
    known = {"cwd": cwd, "session": session, "command": command}
    quoted = {**known, "cwd": shlex.quote(cwd)}

    def fill(index: int, word: str) -> str:
        is_shells = "{command}" in word
        joiners = len(_joiners(words[:index]))
        for found in _PLACEHOLDER.finditer(word):
            is_twice = joiners > 1 or _is_parsed_twice(word[: found.start()])
            is_unsafe = is_twice or _QUOTES.search(word) is not None
            is_safe = {
                "command": all(each == shlex.quote(each) for each in argv) or not is_twice,
                "cwd": cwd == shlex.quote(cwd)
                or not (is_unsafe if is_shells else _is_program_text(words, index)),
            }
            if not is_safe.get(found[1], True):
                raise _in_text(name, found[0], known[found[1]])
        values = quoted if is_shells else known
        return _PLACEHOLDER.sub(lambda found: values[found[1]], word)

    return [fill(index, word) for index, word in enumerate(words)]


def _following(words: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Return the words of the command that follow a prefix."""
    joiners = _joiners(words)
    quoted = [shlex.quote(word) for word in argv]
    if not joiners or quoted == list(argv):
        return list(argv)
    if len(joiners) == 1 and _is_joiner(words[0]):
        return quoted
    # The word may be the name of a host, the second ssh in a row, or a script that quotes its words
    # itself: then one quoting is wrong.
    hint = "end the prefix with a word that has {command}, such as 'exec {command}'"
    message = f"wrap runs {joiners[-1]}, which does not keep the words of the agent's command apart"
    raise UsageError(message, hint=hint)


def _joiners(words: Sequence[str]) -> list[str]:
    """Return the programs in these words, and in the texts among them, that join their words."""
    found: list[str] = []
    skipped: set[int] = set()
    for index, word in enumerate(words):
        if index in skipped:
            continue
        if _is_joiner(word):
            found.append(os.path.basename(word))
            skipped.update(_own_values(words, index + 1))
        else:
            found += [word] if word == _EVAL else _JOINER_INSIDE.findall(word)
    return found


def _own_values(words: Sequence[str], first: int) -> Iterator[int]:
    """Find the words with values of `_OWN_VALUES` among the options of ssh before its host."""
    index = first
    while index < len(words) and (option := _SSH_OPTIONS.fullmatch(words[index])) is not None:
        letter, value = option.groups()
        if letter and not value:
            index += 1
        if letter in _OWN_VALUES:
            yield index
        index += 1


def _is_joiner(word: str) -> bool:
    return os.path.basename(word) in _JOINERS


def _is_program_text(words: Sequence[str], index: int) -> bool:
    """Whether a word may be the text of a program, or a part of it."""
    if _joiners(words[:index]):
        return True
    rest = _PLACEHOLDER.sub("", words[index])
    is_after_option = index > 0 and _TEXT_OPTION.fullmatch(words[index - 1]) is not None
    return (
        _TEXT.search(rest) is not None
        or _TEXT_OPTION_INSIDE.match(rest) is not None
        or (bool(rest) and is_after_option)
    )


def _is_parsed_twice(before: str) -> bool:
    """Whether a shell text is between quotes, or belongs to a second shell, after these words."""
    quote, is_escaped = "", False
    for character in before:
        if is_escaped:
            is_escaped = False
        elif character == "\\" and quote != "'":
            is_escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"`":
            quote = character
    return bool(quote) or is_escaped or _JOINER_INSIDE.search(before) is not None


def _in_text(name: str, placeholder: str, value: str) -> UsageError:
    if placeholder == "{command}":
        hint = "leave {command} out of quotes, and give it to one shell only: it is quoted already"
    else:
        read = "$1" if name == "wrap" else f"$BANKSMAN_{placeholder[1:-1].upper()}"
        hint = (
            f'use a folder without special characters, or let {name} read "{read}" in place of '
            f"{placeholder}"
        )
    message = (
        f"{name} has {placeholder} in the text of a program, where it cannot be {value!r:.200}"
    )
    return UsageError(message, hint=hint)


def _check_writable(cwd: str) -> None:
    """Raise `UsageError` for a folder that would undo the sandbox if it were writable."""
    real = os.path.realpath(cwd)
    if real == "/" or any(_is_in(real, each) for each in (*_KERNEL_FOLDERS, *_own_folders())):
        hint = "pass the folder that the agent may change as cwd"
        raise UsageError(f"cannot make {cwd!r:.200} writable in the sandbox bwrap", hint=hint)


def _hiding(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of bwrap with Banksman's own files hidden.

    With the token of the server or the credentials of a cluster, an agent could start programs
    outside of its sandbox.
    """
    hidden = [each for path in _own_folders() if os.path.isdir(path) for each in ("--tmpfs", path)]
    # Behind the session's folder, which they may be in.
    index = words.index("--proc")
    return (*words[:index], *hidden, *words[index:])


def _own_folders() -> list[str]:
    try:
        own = folders.state_folder(), folders.config_folder()
    except UsageError:
        return []  # This user has no home, and Banksman no such files.
    return [os.path.realpath(path) for path in own]


def _is_in(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")
