r"""Match regular expressions in bounded time, by simulating a nondeterministic automaton.

Python's own matcher backtracks. For some patterns (`^(a+)+$`) the number of attempts doubles with
each character. A value of forty letters from an agent would block the event loop, and with it every
other session, for hours. Therefore Python only parses the pattern. This module builds a
nondeterministic automaton from the parse tree and simulates it with a set of states. Each character
costs a bounded number of steps. A pattern without an automaton (a reference to a group, a lookahead
or lookbehind) is refused when the schema is given.

In JSON Schema, `$` matches only at the end of the text, and \d and \w are ASCII. Here \s is ASCII
too, but not in JSON Schema. In Python, `$` also matches before a final newline, so a one-line value
could have two lines.

**The parser is private.** `re._parser` has built the same tree from Python 3.11 to 3.13, and a
later Python may change it. Therefore the parser is looked up for each pattern, and an unknown node
or shape refuses that pattern. Schemas without patterns do not depend on the parser. `test_regex.py`
compares the results with `re`, on every tested Python version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

# Maximum number of states of one automaton, with every repetition unrolled.
STATES_MAX = 2000
# Maximum number of steps for one text: a fraction of a second.
STEPS_MAX = 1_000_000
# Maximum number of cached transitions. With the cache, a long text costs one lookup for each
# character.
REMEMBERED_MAX = 10_000

HINT = (
    "use the syntax of Python's re, without backreferences, lookahead, lookbehind,"
    " and flags other than (?i), (?m) and (?s)"
)


class BadPattern(Exception):
    """The text cannot be used as a pattern. The message says why."""


class MatchTooCostly(Exception):
    """The value cannot be judged within the bounds.

    This is an exception and not a fault, because `not` would turn a fault into a match.
    """


@lru_cache(maxsize=256)
def compiled(text: str) -> Pattern:
    """Compile a pattern, with a cache. Raises `BadPattern` if it is invalid or has no automaton."""
    return Pattern(text)


Is = Callable[[str], bool]
# A position in the text: the characters before and after it, "" at the ends.
Between = tuple[str, str]


class Pattern:
    """Nondeterministic automaton of one pattern.

    States are numbers. A state has an edge for some characters, an edge under a condition on the
    position, or edges without a condition. State 0 accepts.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._characters: dict[int, tuple[Is, int]] = {}
        self._conditions: dict[int, tuple[Callable[[Between], bool], int]] = {}
        self._epsilon: dict[int, list[int]] = {0: []}
        self._count = 1  # State 0 accepts.
        self._cache: dict[Any, frozenset[int]] = {}
        try:
            tree: Any = getattr(re, "_parser").parse(text, re.ASCII)  # noqa: B009
            flags = int(tree.state.flags)
            if flags & ~(re.ASCII | re.MULTILINE | re.DOTALL | re.IGNORECASE):
                raise self._refused("flags")
            self._is_multiline = bool(flags & re.MULTILINE)
            self._is_dotall = bool(flags & re.DOTALL)
            self._ignores_case = bool(flags & re.IGNORECASE)
            self._start = self._sequence(tree, 0)
        except (re.error, RecursionError, OverflowError, Warning) as exc:
            raise BadPattern(f"is not a pattern: {exc}") from exc
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            # The flags exclude each other, or the tree has a shape that this module does not know.
            raise BadPattern(f"cannot be read: {exc}") from exc

    def search(self, text: str) -> bool:
        """Search a text for a match. Raises `MatchTooCostly` after `STEPS_MAX` steps."""
        states: frozenset[int] = frozenset()
        before, steps = "", 0
        for index in range(len(text) + 1):
            after = text[index] if index < len(text) else ""
            reached = self._closure(states | {self._start}, (before, after))
            if 0 in reached:
                return True
            steps += 1 + len(reached)
            if steps > STEPS_MAX:
                raise MatchTooCostly(
                    f"cannot be checked: the pattern {self._text!r:.60} takes too long"
                )
            states = self._next(reached, after) if after else frozenset()
            before = after
        return False

    # -- simulation -------------------------------------------------------------------------------
    def _closure(self, states: frozenset[int], between: Between) -> frozenset[int]:
        """Return the states reachable from these without a character."""
        before, after = between
        # Everything on which a condition depends: text ends, line ends and word characters.
        kind = (
            not before,
            not after,
            before == "\n",
            after == "\n",
            _is_word(before),
            _is_word(after),
        )
        return self._cached((states, kind), lambda: self._closure_of(states, between))

    def _closure_of(self, states: Iterable[int], between: Between) -> frozenset[int]:
        reached: set[int] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state not in reached:
                reached.add(state)
                waiting += self._epsilon.get(state, ())
                condition = self._conditions.get(state)
                if condition is not None and condition[0](between):
                    waiting.append(condition[1])
        return frozenset(reached)

    def _next(self, states: frozenset[int], character: str) -> frozenset[int]:
        def move() -> frozenset[int]:
            leading = (self._characters[state] for state in states if state in self._characters)
            return frozenset(following for is_it, following in leading if is_it(character))

        return self._cached((states, character), move)

    def _cached(self, key: Any, make: Callable[[], frozenset[int]]) -> frozenset[int]:
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= REMEMBERED_MAX:
                self._cache.clear()
            found = self._cache[key] = make()
        return found

    # -- construction: each part gets the state that follows it, and returns its first state ------
    def _new_state(self) -> int:
        self._count += 1
        if self._count > STATES_MAX:
            raise self._refused("too many states")
        return self._count - 1

    def _sequence(self, parts: Any, following: int) -> int:
        for operation, argument in reversed(list(parts)):
            following = self._part(operation, argument, following)
        return following

    def _part(self, operation: Any, argument: Any, following: int) -> int:
        match str(operation):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                state = self._new_state()
                self._characters[state] = self._character(operation, argument), following
                return state
            case "AT":
                state = self._new_state()
                self._conditions[state] = self._condition(argument), following
                return state
            case "BRANCH":
                state = self._new_state()
                self._epsilon[state] = [self._sequence(part, following) for part in argument[1]]
                return state
            case "SUBPATTERN":
                _group, added, removed, parts = argument
                if added or removed:
                    raise self._refused("flags")
                return self._sequence(parts, following)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, parts = argument
                return self._repeat(least, most, parts, following)
            case _:
                raise self._refused(str(operation).lower().replace("_", " "))

    def _repeat(self, least: int, most: Any, parts: Any, following: int) -> int:
        if str(most) == "MAXREPEAT":
            begin = self._new_state()
            self._epsilon[begin] = [self._sequence(parts, begin), following]
        else:
            begin = following
            for _ in range(most - least):
                state = self._new_state()
                self._epsilon[state] = [self._sequence(parts, begin), following]
                begin = state
        for _ in range(least):
            begin = self._sequence(parts, begin)
            # An empty part counts too. Otherwise a huge number of them would cost unbounded time.
            self._new_state()
        return begin

    def _character(self, operation: Any, argument: Any) -> Is:
        match str(operation):
            case "LITERAL":
                return self._one_of([(operation, argument)])
            case "NOT_LITERAL":
                is_it = self._in_either_case(chr(argument).__eq__)
                return lambda character: not is_it(character)
            case "ANY":
                return _is_any if self._is_dotall else "\n".__ne__
            case _:
                return self._one_of(argument)

    def _one_of(self, choices: Any) -> Is:
        is_negated = str(choices[0][0]) == "NEGATE"
        tests = [self._in_either_case(self._choice(*choice)) for choice in choices[is_negated:]]
        if len(tests) == 1 and not is_negated:
            return tests[0]
        return lambda character: any(test(character) for test in tests) is not is_negated

    def _in_either_case(self, test: Is) -> Is:
        """Under (?i), return a test for either case. Only ASCII letters have two cases here."""
        if not self._ignores_case:
            return test
        return lambda character: (
            test(character) or (character.isascii() and test(character.swapcase()))
        )

    def _choice(self, operation: Any, argument: Any) -> Is:
        match str(operation):
            case "LITERAL":
                return chr(argument).__eq__
            case "RANGE":
                low, high = argument
                return lambda character: low <= ord(character) <= high
            case "CATEGORY":
                name = str(argument).removeprefix("CATEGORY_")
                test = _CATEGORIES[name.removeprefix("NOT_")]
                return (lambda character: not test(character)) if name.startswith("NOT_") else test
            case _:
                raise self._refused(str(operation).lower())

    def _condition(self, code: Any) -> Callable[[Between], bool]:
        match str(code):
            case "AT_BEGINNING" if self._is_multiline:
                return lambda between: between[0] in ("", "\n")
            case "AT_BEGINNING" | "AT_BEGINNING_STRING":
                return lambda between: not between[0]
            case "AT_END" | "AT_END_STRING":
                return lambda between: not between[1]
            case "AT_BOUNDARY":
                return lambda between: _is_word(between[0]) is not _is_word(between[1])
            case "AT_NON_BOUNDARY":
                # Python finds no \B in an empty text.
                return lambda between: (
                    _is_word(between[0]) is _is_word(between[1]) and between != ("", "")
                )
            case _:
                raise self._refused(str(code).lower())

    @staticmethod
    def _refused(what: str) -> BadPattern:
        return BadPattern(f"cannot be matched in bounded time: {what}")


def _is_any(_: str) -> bool:
    return True


def _is_word(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character == "_")


_CATEGORIES: dict[str, Is] = {
    "DIGIT": lambda character: "0" <= character <= "9",
    "SPACE": lambda character: character in " \t\n\r\f\v",
    "WORD": _is_word,
}
