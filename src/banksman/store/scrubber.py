"""Remove secrets, what looks like a key, and personal data from a text, for bug reports.

**Windows.** One call of `re` keeps the GIL until it returns: 0.5 s for a MiB of text. Other threads
of the server wait meanwhile, and so does its event loop. So a long text is searched in windows of
`WINDOW` characters, and the threads take turns between them. A window only finds where a match
begins. It looks `BEYOND` characters further, which is more than any pattern needs to decide. The
match itself is then made in the whole text, so that the end of a window cuts no key. The result is
the same as that of one call.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from banksman.core.redaction.redactor import Redactor
from banksman.core.wire.elided_text import REDACTED

# Characters that one call searches, and more than the longest beginning of a match (`_begin`).
WINDOW = 16 << 10
BEYOND = 4 << 10

Scrub = Callable[[str], str]

# Each pattern of a key begins at a word boundary, so that a long text without a key is scanned
# once.
_KEY = (
    # Also after a newline that is escaped as in JSON, which the output of tools often contains.
    r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt]))(?:"
    r"sk-[A-Za-z0-9_-]{12,}|sk_(?:live|test)_[A-Za-z0-9]{12,}|npm_[A-Za-z0-9]{16,}|hf_[A-Za-z0-9]{16,}|pypi-[\w-]{16,}"
    r"|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|xox[a-z]-[A-Za-z0-9-]{8,}"
    r"|A(?:KIA|SIA)[A-Z0-9]{12,}"
    r"|AIza[A-Za-z0-9_-]{30,}"
    # Named tokens and page tokens of this program (server/access, server/http/auth.py).
    r"|bmt_[A-Za-z0-9_-]{20,}|bmp_[A-Za-z0-9_-]{16}\.[0-9]{1,12}\.[A-Za-z0-9_-]{43}"
    r"|eyJ[A-Za-z0-9_-]{6,}+%s"
    r")"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,40}-----)?"
)
# The parts of a JWT have any length, so only its first characters are looked for in a window.
_KEYS = re.compile(_KEY % r"\.[A-Za-z0-9_-]{6,}+\.[A-Za-z0-9_-]*")
_KEYS_BEGIN = re.compile(_KEY.replace("{6,}+%s", "{6}"))
# The replacement keeps the word before the secret.
_AFTER_WORD = re.compile(
    r"(?i:(\bbearer\s{1,8}|\bauthorization\W{1,8}basic\s{1,8})[A-Za-z0-9._~+/=-]{8,})"
)
_VALUE = re.compile(
    # Without the beginning of the word: a search for that is slow in a text of many short words.
    r"((?i:(?:key|token|secret|password|passwd)\\?[\"']?\s{0,3}[=:]\s{0,3}\\?[\"']?))[^\s\"'\\&,;]{6,}"
)
_IN_URL = re.compile(r"(://[^\s/:@\"']{0,100}:)[^\s/@\"']{1,200}(?=@)")
_EMAIL = re.compile(
    r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])"
)
_HOMES = re.compile(r"((?:/home|/Users|\\Users|\\\\Users)[/\\]{1,2})[^/\\\s\"':]{1,64}")


class _Rule(NamedTuple):
    """A pattern with its replacement.

    `begin`: finds each place where a match may begin. `needle`: a text without it has no match.
    """

    begin: re.Pattern[str]
    whole: re.Pattern[str]
    replacement: str
    needle: str = ""

    def apply(self, text: str) -> str:
        """Return what `self.whole.sub(self.replacement, text)` returns."""
        if self.needle not in text:
            return text
        if len(text) <= WINDOW:
            return self.whole.sub(self.replacement, text)
        pieces: list[str] = []
        kept = place = 0
        while place < len(text):
            end = place + WINDOW
            found = self.begin.search(text, place, end + BEYOND)
            if found is None or found.start() >= end:
                place = end
                continue
            match = self.whole.match(text, found.start())
            if match is None:
                place = found.start() + 1
                continue
            pieces += (text[kept : match.start()], match.expand(self.replacement))
            kept = place = match.end()
        return "".join((*pieces, text[kept:]))


def scrubber(secrets: Iterable[str] = ()) -> Scrub:
    """Return the function that removes secrets and personal data from a string."""
    redactor = Redactor(secrets)
    rules = [
        _Rule(_KEYS_BEGIN, _KEYS, REDACTED),
        *(_Rule(each, each, rf"\1{REDACTED}") for each in (_AFTER_WORD, _VALUE, _IN_URL)),
        _Rule(_EMAIL, _EMAIL, "[email]", "@"),
        *(_Rule(pattern, pattern, replacement) for pattern, replacement in _personal()),
        _Rule(_HOMES, _HOMES, r"\1[user]"),
    ]

    def scrub(text: str) -> str:
        text = redactor.redact_text(text)
        for rule in rules:
            text = rule.apply(text)
        return text

    return scrub


def _personal() -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns for the home folder and for the user's name in paths.

    The home folder also appears with dashes, because agents name folders after it.
    """
    users = {os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
    homes = {os.path.expanduser("~")}
    try:
        account = pwd.getpwuid(os.getuid())
    except KeyError:
        pass  # A container's user without an entry in the user database.
    else:
        users.add(account.pw_name)
        homes.add(account.pw_dir)
    homes = {home.rstrip("/") for home in homes if home.startswith("/") and home.rstrip("/")}
    patterns: list[tuple[re.Pattern[str], str]] = []
    for home in sorted(homes, key=len, reverse=True):
        patterns.append((re.compile(rf"(?<![\w.]){re.escape(home)}(?!\w)"), "[home]"))
        # For a home like /root the pattern would match option names.
        if home.count("/") > 1:
            dashed = re.escape(re.sub(r"[^A-Za-z0-9]", "-", home))
            patterns.append((re.compile(rf"(?<![\w.]){dashed}(?!\w)"), "-[home]"))
    names = [
        re.compile(rf"(?<=[/\\]){re.escape(user)}(?=[/\\]|$)")
        for user in sorted(filter(None, users))
    ]
    return [*patterns, *((name, "[user]") for name in names)]
