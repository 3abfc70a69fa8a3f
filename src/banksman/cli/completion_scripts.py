"""Completion scripts for bash, zsh and fish, generated from the completion table.

bash and zsh get one function that finds the verb and the position of the cursor. It uses three
tables: the flags of each verb, the kind of value after each flag, and the kind of each positional
word. fish gets one `complete` line per verb, flag and word, with a condition on the position. The
scripts ask `banksman completion --list` for names that change, such as sessions.
"""

from __future__ import annotations

from collections.abc import Iterator

from banksman.cli.completion_table import LISTED, CommandEntry, Flag, Slot, WordKind

_BASH = r"""# Completion of banksman for bash, generated from its parsers. To enable it:
#   eval "$(banksman completion bash)"

# The flags of a verb.
_banksman_flags() {
    case $1 in
@FLAGS@
    esac
}

# The kind of value that a flag of a verb takes; empty if it takes none.
_banksman_takes() {
    case "$1 $2" in
@TAKES@
    esac
}

# The kind of each positional word of a verb, counted from 0.
_banksman_slot() {
    case "$1 $2" in
@SLOTS@
    esac
}

# Offer the matching lines, each quoted as one shell word.
_banksman_offer() {
    local line
    while IFS= read -r line; do
        [[ -n $line && $line == "$cur"* ]] && COMPREPLY+=("$(printf '%q' "$line")")
    done
}

# Offer the built-in completions of bash.
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
        sessions | agents | keys)
            _banksman_offer < <("$banksman" completion --list "$1" 2>/dev/null) ;;
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

_ZSH = r"""#compdef banksman
# Completion of banksman for zsh, generated from its parsers. To enable it, after compinit:
#   source <(banksman completion zsh)
# or save it as _banksman in a folder of $fpath.

# The flags of a verb, each with its description.
_banksman_flags() {
    case $1 in
@FLAGS@
    esac
}

# The kind of value that a flag of a verb takes; empty if it takes none.
_banksman_takes() {
    reply=()
    case "$1 $2" in
@TAKES@
    esac
}

# The kind of each positional word of a verb, counted from 0.
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

_FISH = r"""# Completion of banksman for fish, generated from its parsers. To enable it:
#   banksman completion fish | source

# The position of the cursor: the verb, and the number of words before the cursor; "after" inside a
# command.
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

# Complete the command after -- as fish completes it without banksman.
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


def script(shell: str, verbs: list[CommandEntry]) -> str:
    """Return the completion script for a shell."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](verbs)


# -- bash and zsh --------------------------------------------------------------------------------
def _bash(verbs: list[CommandEntry]) -> str:
    flags = [
        f"{verb.name}) echo {' '.join(name for flag in verb.flags for name in flag.names)} ;;"
        for verb in verbs
    ]
    return _filled(_BASH, verbs, " ".join(verb.name for verb in verbs), flags, "{}) echo {} ;;")


def _zsh(verbs: list[CommandEntry]) -> str:
    flags = [f"{verb.name}) described=({_flag_pairs(verb)}) ;;" for verb in verbs]
    described = "\n".join(f"            {_pair(verb.name, verb.what)}" for verb in verbs)
    return _filled(_ZSH, verbs, described, flags, "({}) reply=({}) ;;")


def _flag_pairs(verb: CommandEntry) -> str:
    return " ".join(_pair(name, flag.what) for flag in verb.flags for name in flag.names)


def _filled(
    template: str, verbs: list[CommandEntry], names: str, flags: list[str], branch: str
) -> str:
    """Fill a template with the tables. `branch`: format of one branch of the shell's `case`."""
    tables = {
        "@FLAGS@": flags,
        "@TAKES@": [branch.format(*each) for verb in verbs for each in _takes(verb)],
        "@SLOTS@": [branch.format(*each) for verb in verbs for each in _slots(verb)],
    }
    text = template.replace("@VERBS@", names)
    for place, lines in tables.items():
        text = text.replace(place, "\n".join(f"        {line}" for line in lines))
    return text


def _takes(verb: CommandEntry) -> Iterator[tuple[str, str]]:
    for flag in verb.flags:
        if flag.takes is not None:
            yield (
                " | ".join(f"'{verb.name} {name}'" for name in flag.names),
                _kind_and_words(flag.takes),
            )


def _slots(verb: CommandEntry) -> Iterator[tuple[str, str]]:
    for number, slot in enumerate(verb.slots):
        if slot.kind is not WordKind.NOTHING:
            which = f"'{verb.name} '*" if slot.is_repeated else f"'{verb.name} {number}'"
            yield which, _kind_and_words(slot)


def _kind_and_words(slot: Slot) -> str:
    return " ".join((slot.kind.value, *slot.words))


def _pair(word: str, what: str) -> str:
    """Format a word and its description for zsh's `_describe`. A colon in the word is escaped."""
    escaped = word.replace(":", "\\:")
    return "'" + f"{escaped}:{what}".replace("'", "'\\''") + "'"


# -- fish ----------------------------------------------------------------------------------------
def _fish(verbs: list[CommandEntry]) -> str:
    return _FISH + "\n".join(_fish_lines(verbs)) + "\n"


def _fish_lines(verbs: list[CommandEntry]) -> Iterator[str]:
    # Flags that take a value. The word after one of them is not a positional word of the verb.
    taking = [
        _fish_quoted(f"{verb.name} {name}")
        for verb in verbs
        for flag in verb.flags
        if flag.takes
        for name in flag.names
    ]
    yield f"set -g __banksman_takes {' '.join(taking)}"
    yield "complete -c banksman -f"
    yield "complete -c banksman -n '__banksman_at \" 0\"' -l help -l version"
    for verb in verbs:
        yield (
            'complete -c banksman -n \'__banksman_at " 0" "help 0"\' '
            f"-a {verb.name} -d {_fish_quoted(verb.what)}"
        )
    for verb in verbs:
        for flag in verb.flags:
            yield _fish_flag(verb, flag)
        yield from _fish_slots(verb)
        if verb.has_command:
            condition = f'__banksman_at "{verb.name} after"'
            yield f"complete -c banksman -n '{condition}' -a '(__banksman_command)'"


def _fish_flag(verb: CommandEntry, flag: Flag) -> str:
    names = " ".join(
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names
    )
    takes = "" if flag.takes is None else f" -r {_fish_offer(flag.takes)}"
    return (
        f"complete -c banksman -n '__banksman_verb {verb.name}' "
        f"{names}{takes} -d {_fish_quoted(flag.what)}"
    )


def _fish_slots(verb: CommandEntry) -> Iterator[str]:
    for number, slot in enumerate(verb.slots):
        if slot.kind is WordKind.NOTHING:
            continue
        numbers = range(number, number + 3) if slot.is_repeated else (number,)
        places = " ".join(f'"{verb.name} {each}"' for each in numbers)
        yield f"complete -c banksman -n '__banksman_at {places}' {_fish_offer(slot)}"


def _fish_offer(slot: Slot) -> str:
    match slot.kind:
        case WordKind.WORDS:
            return f"-f -a {_fish_quoted(' '.join(slot.words))}"
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


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
