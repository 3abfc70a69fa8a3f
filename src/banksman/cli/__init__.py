"""Command-line entry point: exit codes, the list of verbs, and the dispatch to their modules.

Each verb is a module in `commands`, imported only when it is called. `--help` and `exec` therefore
start fast.
"""

from __future__ import annotations

import sys

# Exit codes that all verbs share. `banksman VERB --help` lists the codes of that verb.
OK, NOT_DONE, USAGE, NO_SERVER, REFUSED, NOT_SAID = 0, 1, 2, 3, 4, 5
OWN_FAILURE, INTERRUPTED = 125, 130

# Verbs by purpose, each with its line in the help.
GROUPS: dict[str, dict[str, str]] = {
    "run something": {
        "run": "ask an agent one thing, watch it answer, and leave nothing running",
        "exec": "run a command; when it is over, nothing of it is left",
    },
    "talk with an agent": {
        "open": "open a session with an agent",
        "ask": "ask the agent something, and watch it answer",
        "attach": "watch a session live, talk in it, and answer what the agent asks",
        "answer": "answer a question of the agent's",
        "interrupt": "stop a turn",
        "close": "close a session",
    },
    "look": {
        "ps": "what there is",
        "top": "the same, live",
        "why": "what a session is doing, and what it waits for",
        "log": "what was said in a session, and is being said",
        "agents": "which agents are known, what each can do, and which are here",
        "hosts": "the hosts that share a store, and their room",
    },
    "serve": {
        "serve": "serve sessions and commands over HTTP, with a page",
        "page": "print a link that opens the page in a browser",
        "host": "take sessions of a store that many machines share",
        "acp": "be an ACP agent for an editor, with supervised sessions behind it",
        "drain": "let the server, or a host, finish what runs, and exit",
    },
    "set up": {
        "doctor": "whether all is well on this machine, and how to put right what is not",
        "config": "what is set, where it came from, and a file to set it in",
        "completion": "let the shell complete verbs, flags, agents and sessions",
    },
}
VERBS = tuple(verb for group in GROUPS.values() for verb in group)


def main(argv: list[str] | None = None) -> int:
    """Run the verb and return its exit code.

    `argv`: the words after `banksman`; None for `sys.argv`.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        code = _verb(words)
        if argv is None and words[:1] == ["exec"]:
            _leave(code)
        return code
    except KeyboardInterrupt:
        # The signal came before the verb installed its handlers, or after it removed them. There is
        # nothing to end. Further Ctrl-C are ignored, so that a second one prints no traceback.
        import signal  # noqa: PLC0415

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return INTERRUPTED


def help_text() -> str:
    """Return the text of `banksman --help`."""
    width = max(map(len, VERBS))
    groups = (
        "\n".join([f"{title}:", *(f"  {verb:<{width}}  {what}" for verb, what in group.items())])
        for title, group in GROUPS.items()
    )
    listing = "\n\n".join(groups)
    return f"""\
usage: banksman [--version] [--help] VERB …

Runs commands and coding agents as subprocesses, and ends them: the whole tree, every time.

{listing}

`banksman VERB --help` says more.

examples:
  banksman run claude "Why is CI red?"
  banksman exec --timeout 60 -- make test
"""


def _verb(words: list[str]) -> int:
    match words:
        case [] | ["-h" | "--help" | "help"]:
            return _print(help_text(), OK if words else USAGE)
        case ["-h" | "--help" | "help", verb, *_] if verb in VERBS:
            return _call(verb, ["--help"])
        case ["--version", *_]:
            from banksman import __version__  # noqa: PLC0415

            return _print(f"banksman {__version__}\n", OK)
        case [verb, *rest] if verb in VERBS:
            return _call(verb, rest)
        case _:
            return _unknown(words[0])


def _leave(code: int) -> None:
    """Exit the process immediately, without the teardown of the interpreter.

    The command is over and reported. Freeing every object would take a good part of the run time of
    a short command. Returns if a stream cannot be flushed; the process then exits in the normal
    way.
    """
    import atexit  # noqa: PLC0415
    import os  # noqa: PLC0415

    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # The stream is closed or cannot be written. The interpreter reports that at its normal
        # exit.
        return
    # The exit functions stop the helper processes and remove output files that were not kept.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    os._exit(code)


def _print(text: str, code: int) -> int:
    try:
        print(text, end="", flush=True)
    except OSError as exc:
        print(f"banksman: cannot write to stdout: {exc.strerror}", file=sys.stderr)
        from banksman.cli.output import close_stdout  # noqa: PLC0415

        close_stdout()
        return NOT_SAID
    return code


def _fill_standard_fds() -> None:
    """Open /dev/null for each standard fd that is closed.

    The parent may have closed some of them (`>&-`). The next fds that this process opens would then
    get the numbers 0 to 2: an fd of the event loop, the store or a socket. A library that prints an
    error would write into it. `sys.stdin`, `sys.stdout` and `sys.stderr` do not change: Python has
    set them to None at its start.
    """
    import os  # noqa: PLC0415

    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _call(verb: str, words: list[str]) -> int:
    from importlib import import_module  # noqa: PLC0415

    # `acp` hands its standard fds over to the editor protocol and checks them itself.
    if verb != "acp":
        _fill_standard_fds()
    return int(import_module(f"banksman.cli.commands.{verb}").main(words))


def _unknown(word: str) -> int:
    from difflib import get_close_matches  # noqa: PLC0415

    near = get_close_matches(word, VERBS, n=1)
    hint = f"did you mean {near[0]}?" if near else "see banksman --help"
    print(f"banksman: there is no verb {word!r}; {hint}", file=sys.stderr)
    return USAGE
