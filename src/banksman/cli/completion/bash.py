"""The script for bash: tables of what each verb takes, and one function that finds out where the cursor stands."""

from __future__ import annotations

from collections.abc import Iterator

from banksman.cli.completion.command_table import CommandEntry, Slot, WordKind

_SCRIPT = r"""# Completion of banksman for bash, made from its parsers. To have it:  eval "$(banksman completion bash)"

# The flags of a verb.
_banksman_flags() {
    case $1 in
@FLAGS@
    esac
}

# What follows a flag of a verb; nothing: the flag stands alone.
_banksman_takes() {
    case "$1 $2" in
@TAKES@
    esac
}

# What a word of a verb is: the first is 0.
_banksman_slot() {
    case "$1 $2" in
@SLOTS@
    esac
}

# Offers the lines that fit, each as a shell takes it for one word.
_banksman_offer() {
    local line
    while IFS= read -r line; do
        [[ -n $line && $line == "$cur"* ]] && COMPREPLY+=("$(printf '%q' "$line")")
    done
}

# Offers what bash knows by itself.
_banksman_own() {
    local line
    compopt -o filenames 2>/dev/null
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done < <(compgen "$1" -- "$cur")
}

_banksman_fill() {
    case $1 in
        words) shift; _banksman_offer < <(printf '%s\n' "$@") ;;
        files) _banksman_own -f ;;
        folders) _banksman_own -d ;;
        commands) _banksman_own -c ;;
        sessions | agents | keys) _banksman_offer < <("$banksman" completion --list "$1" 2>/dev/null) ;;
    esac
}

_banksman() {
    local banksman=$1 cur=${COMP_WORDS[COMP_CWORD]} verb='' flag='' slot=0 after=-1 i word
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ -z $verb || $verb == help ]]; then
            [[ $word == -h || $word == --help ]] && word=help
            [[ $word == -* ]] || verb=$word
        elif ((after >= 0)); then
            after=$((after + 1))
        elif [[ -n $flag ]]; then
            # Bash makes three words of --flag=value.
            [[ $word == = ]] || flag=''
        elif [[ $word == -- ]]; then
            after=0
        elif [[ $word == -* ]]; then
            [[ -n $(_banksman_takes "$verb" "$word") ]] && flag=$word
        elif [[ $(_banksman_slot "$verb" "$slot") == commands* ]]; then
            after=1
        else
            slot=$((slot + 1))
        fi
    done
    [[ $cur == = ]] && cur=''
    if [[ -z $verb || $verb == help ]]; then
        _banksman_fill words @VERBS@
        [[ -z $verb && $cur == -* ]] && _banksman_fill words --help --version
    elif ((after == 0)); then
        _banksman_fill commands
    elif ((after > 0)); then
        _banksman_fill files
    elif [[ -n $flag ]]; then
        _banksman_fill $(_banksman_takes "$verb" "$flag")
    elif [[ $cur == -* ]]; then
        _banksman_fill words $(_banksman_flags "$verb")
    else
        _banksman_fill $(_banksman_slot "$verb" "$slot")
    fi
    return 0
}

complete -F _banksman banksman
"""


def script(verbs: list[CommandEntry]) -> str:
    tables = {
        "@FLAGS@": [f"{verb.name}) echo {' '.join(_names(verb))} ;;" for verb in verbs],
        "@TAKES@": [line for verb in verbs for line in _takes(verb)],
        "@SLOTS@": [line for verb in verbs for line in _slots(verb)],
    }
    text = _SCRIPT.replace("@VERBS@", " ".join(verb.name for verb in verbs))
    for place, lines in tables.items():
        text = text.replace(place, "\n".join(f"        {line}" for line in lines))
    return text


def _names(verb: CommandEntry) -> Iterator[str]:
    for flag in verb.flags:
        yield from flag.names


def _takes(verb: CommandEntry) -> Iterator[str]:
    for flag in verb.flags:
        if flag.takes is not None:
            names = " | ".join(f"'{verb.name} {name}'" for name in flag.names)
            yield f"{names}) echo {_said(flag.takes)} ;;"


def _slots(verb: CommandEntry) -> Iterator[str]:
    for number, slot in enumerate(verb.slots):
        if slot.kind is not WordKind.NOTHING:
            which = f"'{verb.name} '*" if slot.is_repeated else f"'{verb.name} {number}'"
            yield f"{which}) echo {_said(slot)} ;;"


def _said(slot: Slot) -> str:
    return " ".join((slot.kind.value, *slot.words))
