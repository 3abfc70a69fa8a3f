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
    "run": {
        "run": "Open a session, ask one thing, print the answer, and close it.",
        "exec": "Run a command, and end its whole process tree.",
        "guard": "Run a command in place, and end its tree when it or its caller is over.",
    },
    "talk to an agent": {
        "open": "Open a session with an agent.",
        "ask": "Send a prompt to a session, and print the answer.",
        "attach": "Watch a session live, send prompts and answer questions.",
        "answer": "Answer a question of the agent.",
        "interrupt": "Interrupt a turn.",
        "edit": "Change the prompt or the priority of a waiting ask.",
        "hold": "Reserve a session for several asks in a row.",
        "close": "Close a session.",
        "share": "Share a session with other callers of the server.",
        "unshare": "Share a session with some callers no longer.",
    },
    "inspect": {
        "ps": "List sessions.",
        "top": "Live view of all sessions.",
        "why": "Explain what a session is waiting for.",
        "log": "Print the events of a session.",
        "export": "Write the whole log of a session to a file.",
        "bundle": "Write an archive for a bug report about a session.",
        "agents": "List the known agents, what each can do, and which are installed.",
        "hosts": "List the hosts that share a store, and their free room.",
        "usage": "Show tokens, cost and working time by day, session, agent or caller.",
    },
    "serve": {
        "serve": "Serve sessions and commands over HTTP, with a web page.",
        "page": "Print a link that opens the web page in a browser.",
        "token": "Create, list and revoke named tokens for other people and programs.",
        "host": "Run sessions of a store that many machines share.",
        "acp": "Act as an ACP agent for an editor, with supervised sessions.",
        "drain": "Let the server or a host finish running turns, and exit.",
        "upgrade": "Continue the server as another version, with what it runs.",
    },
    "set up": {
        "doctor": "Check this machine, and say how to fix each problem.",
        "config": "Show the settings and their origin, or write a settings file.",
        "completion": "Print a completion script for the shell.",
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

Run `banksman VERB --help` for the flags of a verb.

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


def _fill_standard_fds(*, inheritable: bool) -> None:
    """Open /dev/null for each standard fd that is closed.

    `inheritable`: the programs that this process starts get it too.

    The parent may have closed some of them (`>&-`). The next fds that this process opens would then
    get the numbers 0 to 2: an fd of the event loop, the store or a socket. A library that prints an
    error would write into it. `sys.stdin`, `sys.stdout` and `sys.stderr` do not change: Python has
    set them to None at its start.
    """
    import os  # noqa: PLC0415

    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, inheritable)
    os.close(fd)


def _call(verb: str, words: list[str]) -> int:
    from importlib import import_module  # noqa: PLC0415

    # `acp` hands its standard fds over to the editor protocol and checks them itself.
    if verb != "acp":
        # A guarded command gets the streams of the caller untouched: a closed one stays closed.
        _fill_standard_fds(inheritable=verb != "guard")
    return int(import_module(f"banksman.cli.commands.{verb}").main(words))


def _unknown(word: str) -> int:
    from difflib import get_close_matches  # noqa: PLC0415

    near = get_close_matches(word, VERBS, n=1)
    hint = f"did you mean {near[0]}?" if near else "see banksman --help"
    print(f"banksman: unknown verb {word!r}; {hint}", file=sys.stderr)
    return USAGE
