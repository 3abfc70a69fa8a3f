"""The script for zsh: the same tables as for bash, with a word on each verb and flag beside it."""

from __future__ import annotations

from collections.abc import Iterator

from banksman.cli.completion.command_table import CommandEntry, Slot, WordKind

_SCRIPT = r"""#compdef banksman
# Completion of banksman for zsh, made from its parsers. To have it, after compinit:  source <(banksman completion zsh)
# or put it as _banksman into a folder of $fpath.

# The flags of a verb, each with what it is for.
_banksman_flags() {
    case $1 in
@FLAGS@
    esac
}

# What follows a flag of a verb; nothing: the flag stands alone.
_banksman_takes() {
    reply=()
    case "$1 $2" in
@TAKES@
    esac
}

# What a word of a verb is: the first is 0.
_banksman_slot() {
    reply=()
    case "$1 $2" in
@SLOTS@
    esac
}

_banksman_fill() {
    local kind=$1
    case $kind in
        words) compadd -- "${@:2}" ;;
        files) _files ;;
        folders) _files -/ ;;
        commands) _command_names -e ;;
        sessions | agents | keys)
            local -a found
            found=(${(f)"$($banksman completion --list $kind 2>/dev/null)"})
            compadd -- $found
            ;;
    esac
}

_banksman() {
    local banksman=${words[1]} verb='' flag='' slot=0 after=-1 i word
    local -a reply described
    for ((i = 2; i < CURRENT; i++)); do
        word=${words[i]}
        if [[ -z $verb || $verb == help ]]; then
            [[ $word == -h || $word == --help ]] && word=help
            [[ $word == -* ]] || verb=$word
        elif ((after >= 0)); then
            ((after += 1))
        elif [[ -n $flag ]]; then
            flag=''
        elif [[ $word == -- ]]; then
            after=0
        elif [[ $word == -* ]]; then
            _banksman_takes $verb $word
            (($#reply)) && flag=$word
        else
            _banksman_slot $verb $slot
            if [[ ${reply[1]} == commands ]]; then after=1; else ((slot += 1)); fi
        fi
    done
    if [[ -z $verb || $verb == help ]]; then
        described=(
@VERBS@
        )
        _describe verb described
        [[ -z $verb && $PREFIX == -* ]] && compadd -- --help --version
    elif ((after == 0)); then
        _banksman_fill commands
    elif ((after > 0)); then
        _files
    elif [[ -n $flag ]]; then
        _banksman_takes $verb $flag
        _banksman_fill $reply
    elif [[ $PREFIX == --*=* ]]; then
        _banksman_takes $verb ${PREFIX%%=*}
        compset -P '*='
        _banksman_fill $reply
    elif [[ $PREFIX == -* ]]; then
        _banksman_flags $verb
        _describe flag described
    else
        _banksman_slot $verb $slot
        _banksman_fill $reply
    fi
}

if [[ ${zsh_eval_context[-1]} == loadautofunc ]]; then
    _banksman "$@"
else
    compdef _banksman banksman
fi
"""


def script(verbs: list[CommandEntry]) -> str:
    text = _SCRIPT.replace("@VERBS@", "\n".join(f"            {_pair(verb.name, verb.what)}" for verb in verbs))
    tables = {
        "@FLAGS@": [line for verb in verbs for line in _flags(verb)],
        "@TAKES@": [line for verb in verbs for line in _takes(verb)],
        "@SLOTS@": [line for verb in verbs for line in _slots(verb)],
    }
    for place, lines in tables.items():
        text = text.replace(place, "\n".join(f"        {line}" for line in lines))
    return text


def _pair(word: str, what: str) -> str:
    """As `_describe` takes it: a word, a colon, and what it is; a colon within the word is behind a backslash."""
    escaped = word.replace(":", "\\:")
    return _quoted(f"{escaped}:{what}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _flags(verb: CommandEntry) -> Iterator[str]:
    pairs = " ".join(_pair(name, flag.what) for flag in verb.flags for name in flag.names)
    yield f"{verb.name}) described=({pairs}) ;;"


def _takes(verb: CommandEntry) -> Iterator[str]:
    for flag in verb.flags:
        if flag.takes is not None:
            names = " | ".join(f"'{verb.name} {name}'" for name in flag.names)
            yield f"({names}) reply=({_said(flag.takes)}) ;;"


def _slots(verb: CommandEntry) -> Iterator[str]:
    for number, slot in enumerate(verb.slots):
        if slot.kind is not WordKind.NOTHING:
            which = f"'{verb.name} '*" if slot.is_repeated else f"'{verb.name} {number}'"
            yield f"({which}) reply=({_said(slot)}) ;;"


def _said(slot: Slot) -> str:
    return " ".join((slot.kind.value, *slot.words))
