"""The script for fish: a line for each verb, flag and word, under a condition that says where the cursor stands."""

from __future__ import annotations

from collections.abc import Iterator

from banksman.cli.completion.command_table import LISTED, CommandEntry, Flag, Slot, WordKind

_SCRIPT = r"""# Completion of banksman for fish, made from its parsers. To have it:  banksman completion fish | source

# Where the cursor stands: the verb, and how many words of it are before; "after", if that is within a command.
function __banksman_place
    set -l verb ''
    set -l flag ''
    set -l slot 0
    for word in (commandline -opc)[2..-1]
        if test -z "$verb" -o "$verb" = help
            contains -- $word -h --help; and set word help
            string match -q -- '-*' $word; or set verb $word
        else if test -n "$flag"
            set flag ''
        else if test "$word" = --
            set slot after
            break
        else if string match -q -- '-*' $word
            contains -- "$verb $word" $__banksman_takes; and set flag $word
        else if test "$verb" = exec
            set slot after
            break
        else
            set slot (math $slot + 1)
        end
    end
    echo "$verb $slot"
end

function __banksman_at
    contains -- (__banksman_place) $argv
end

function __banksman_verb
    set -l place (string split ' ' -- (__banksman_place))
    test "$place[1]" = $argv[1] -a "$place[2]" != after
end

# What fish would offer for the command that stands after --, if it stood alone.
function __banksman_command
    set -l words (commandline -opc)
    set -l at (contains -i -- -- $words)
    or begin
        __fish_complete_path (commandline -ct)
        return
    end
    complete -C (string join -- ' ' (string escape -- $words[(math $at + 1)..-1]) (commandline -ct))
end

function __banksman_list
    set -l words (commandline -opc)
    $words[1] completion --list $argv[1] 2>/dev/null
end

"""


def script(verbs: list[CommandEntry]) -> str:
    return _SCRIPT + "\n".join(_lines(verbs)) + "\n"


def _lines(verbs: list[CommandEntry]) -> Iterator[str]:
    # Which flags take a word of their own: that one is none of the verb's.
    taking = [
        _quoted(f"{verb.name} {name}") for verb in verbs for flag in verb.flags if flag.takes for name in flag.names
    ]
    yield f"set -g __banksman_takes {' '.join(taking)}"
    yield "complete -c banksman -f"
    yield "complete -c banksman -n '__banksman_at \" 0\"' -l help -l version"
    for verb in verbs:
        yield f'complete -c banksman -n \'__banksman_at " 0" "help 0"\' -a {verb.name} -d {_quoted(verb.what)}'
    for verb in verbs:
        for flag in verb.flags:
            yield _flag(verb, flag)
        yield from _slots(verb)
        if verb.has_command:
            condition = f'__banksman_at "{verb.name} after"'
            yield f"complete -c banksman -n '{condition}' -a '(__banksman_command)'"


def _flag(verb: CommandEntry, flag: Flag) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
    takes = "" if flag.takes is None else f" -r {_said(flag.takes)}"
    return f"complete -c banksman -n '__banksman_verb {verb.name}' {names}{takes} -d {_quoted(flag.what)}"


def _slots(verb: CommandEntry) -> Iterator[str]:
    for number, slot in enumerate(verb.slots):
        if slot.kind is WordKind.NOTHING:
            continue
        numbers = range(number, number + 3) if slot.is_repeated else (number,)
        places = " ".join(f'"{verb.name} {each}"' for each in numbers)
        yield f"complete -c banksman -n '__banksman_at {places}' {_said(slot)}"


def _said(slot: Slot) -> str:
    match slot.kind:
        case WordKind.WORDS:
            return f"-f -a {_quoted(' '.join(slot.words))}"
        case WordKind.FILES:
            return "-F"
        case WordKind.FOLDERS:
            return "-f -a '(__fish_complete_directories)'"
        case WordKind.COMMANDS:
            return "-f -a '(__fish_complete_command)'"
        case kind if kind in LISTED:
            return f"-f -a '(__banksman_list {kind.value})'"
        case _:
            return "-f"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
