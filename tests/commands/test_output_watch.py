"""Watches for a pattern: a match is found wherever the output is split, and a watch without a match leaves nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.process.helpers import alive, child, frozen_guards, start, wait_pass, wait_said, wait_until

from banksman import Closed, Command, Ended, Host, MachineError, Refused, UsageError
from banksman.commands import output_watch, registry
from banksman.commands.options import Options
from banksman.commands.output_watch import Match
from banksman.commands.pattern_search import CONTEXT_BYTES, MATCH_BYTES_MAX, PatternSearch, is_plain
from banksman.core.process_facts import Stream
from banksman.process.launch import prepare

# Evaluates each line of its stdin and writes the result.
ECHOES = """
while line := hear():
    os.write(1, eval(line))
"""


@asynccontextmanager
async def echoing(marker: str, **options: Any) -> AsyncGenerator[Command]:
    async with Host("memory:") as host:
        yield await start(host, child(ECHOES, marker), stdin="pipe", **options)


async def tell(command: Command, data: bytes, *, times: int = 1) -> None:
    """Make the command write the data, and wait until the host has read it."""
    wanted = command.written(Stream.STDOUT) + times * len(data)
    await command.write(f"{data!r} * {times}\n".encode())
    while command.written(Stream.STDOUT) < wanted:
        await command.read(after=command.written(Stream.STDOUT))


# The same test twice: a plain pattern is searched in this process, the other one in a helper process.
BOTH = pytest.mark.parametrize("pattern", ["needle", "ne+dle"])


# -- found -----------------------------------------------------------------------------------------------------------
@BOTH
async def test_watch_finds_existing_output(pattern: str, marker: str) -> None:
    async with echoing(marker) as command:
        await tell(command, b"hay needle hay needle")
        assert await command.watch(pattern) == Match(4, 10, b"needle", (), 0)
        assert await command.watch(pattern, after=5) == Match(15, 21, b"needle", (), 0)
        assert await command.watch(pattern, after=16, timeout=0.01) is None


@BOTH
async def test_watch_finds_later_output_in_pieces(pattern: str, marker: str) -> None:
    async with echoing(marker) as command:
        watching = asyncio.ensure_future(command.watch(pattern))
        for byte in b"hay need-needle":
            assert not watching.done()
            await tell(command, bytes([byte]))
        assert await watching == Match(9, 15, b"needle", (), 0)


@BOTH
async def test_watch_returns_none_at_end_without_match(pattern: str, marker: str) -> None:
    async with echoing(marker) as command:
        watching = asyncio.ensure_future(command.watch(pattern))
        await tell(command, b"needl")
        await command.close_stdin()
        assert await watching is None
        assert await command.watch(pattern) is None
        assert await command.watch(pattern, after=1000) is None


async def test_watch_finds_output_after_command_ended() -> None:
    async with Host("memory:") as host:
        command = await start(host, ["sh", "-c", "echo port 8080; echo oh >&2"])
        await command.wait()
        match = await command.watch(r"port (\d+)( and .*)?$")
        assert match is not None
        assert (match.text, match.groups) == ("port 8080", ("8080", None))
        match = await command.watch("o.", stream="stderr")
        assert match is not None
        assert (match.begin, match.text) == (0, "oh")


async def test_watch_past_timeout_still_finds_existing_output(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the helper starts late.
    for name in ("SEARCH_SECONDS_MAX", "OVERTIME_SECONDS_MAX"):
        monkeypatch.setattr(output_watch, name, 60.0)
    async with echoing(marker) as command:
        await tell(command, b"x", times=300_000)
        await tell(command, b"needle")
        began = time.monotonic()
        for pattern in ("needle", "(needle)"):
            assert await command.watch("nothing", timeout=0) is None
            match = await command.watch(pattern, timeout=0)
            assert match is not None
            assert match.begin == 300_000
        assert await command.watch("noth(ing)", timeout=0.05) is None
        assert time.monotonic() - began < output_watch.SEARCH_SECONDS_MAX


async def test_concurrent_watches_find_their_own_matches(marker: str) -> None:
    async with echoing(marker) as command:
        words = [f"word{n};" for n in range(20)]
        watches = [asyncio.ensure_future(command.watch(word)) for word in words]
        watches += [asyncio.ensure_future(command.watch(f"({word})")) for word in words[:4]]
        await tell(command, " ".join(reversed(words)).encode())
        found = await asyncio.gather(*watches)
        assert [match.text for match in found if match] == words + words[:4]


async def test_watch_matches_line_anchors(marker: str) -> None:
    async with echoing(marker) as command:
        await tell(command, b"not ready\nready\n")
        for pattern in ("^ready$", "^(ready)$", rb"^ready\n"):
            match = await command.watch(pattern)
            assert match is not None
            assert match.begin == 10


# -- output that is not kept -----------------------------------------------------------------------------------------
@BOTH
async def test_watch_counts_output_that_was_not_kept(pattern: str, marker: str) -> None:
    async with Host("memory:") as host:
        options = Options(stdin="pipe", output_bytes_max=1000, spill_bytes_max=0)
        command = host.launch(prepare(child(ECHOES, marker)), options)
        await tell(command, b"x" * 497 + b"nee")  # As many bytes as are kept of the beginning.
        await tell(command, b"needle", times=1000)
        await tell(command, b"dle", times=200)
        await tell(command, b"needle")
        # Memory has the beginning, the last 500 bytes, and the bytes that arrived together with them.
        match = await command.watch(pattern)
        assert match == Match(7100, 7106, b"needle", (), 7106 - 500 - 606)
        # From that offset nothing is missing.
        assert await command.watch(pattern, after=7000) == Match(7100, 7106, b"needle", (), 0)


# -- nothing is left -------------------------------------------------------------------------------------------------
@BOTH
async def test_cancelled_watch_leaves_nothing(pattern: str, marker: str) -> None:
    async with echoing(marker) as command:
        before = len(asyncio.all_tasks())
        watch = asyncio.ensure_future(command.watch(pattern))
        await tell(command, b"hay")
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch
        assert len(asyncio.all_tasks()) == before
        assert not command._flow.changed._futures  # pyright: ignore[reportPrivateUsage]
        # A helper process that owes no answer is kept for the next watch, and ends with the command.
        assert len(searches(command)) <= 1
        await command.stop(at_once=True)
        await wait_pass(lambda: not searches(command))


async def test_consecutive_watches_share_a_process(marker: str) -> None:
    async with echoing(marker) as command:
        await tell(command, b"hay needle hay")
        assert await command.watch("(needle|pin)") == Match(4, 10, b"needle", ("needle",), 0)
        (search,) = searches(command)
        for pattern, found in (("h.+y", b"hay needle hay"), ("(pin)?needle", b"needle"), (rb"a+", b"a")):
            match = await command.watch(pattern)
            assert match is not None
            assert match.data == found
        assert await command.watch("(pin)", timeout=0.01) is None
        assert searches(command) == [search]
        # Two concurrent watches have one process each, and one of the two processes stays.
        two = [asyncio.ensure_future(command.watch(pattern)) for pattern in ("(pin)", "pi+n")]
        await wait_pass(lambda: len(searches(command)) == 2)
        await tell(command, b"pin")
        assert [match and match.begin for match in await asyncio.gather(*two)] == [14, 14]
        await wait_pass(lambda command=command: len(searches(command)) == 1)
        await command.stop(at_once=True)
        await wait_pass(lambda: not searches(command))


async def test_idle_search_processes_are_bounded_and_yield_to_others(
    marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ASIDES_MAX", 1)
    monkeypatch.setattr(output_watch, "IDLE_MATCHERS_MAX", 1)
    async with Host("memory:") as host:
        for _ in range(3):
            command = await start(host, child(ECHOES, marker), stdin="pipe")
            await tell(command, b"x")
            assert await command.watch("(x)") is not None
            await wait_pass(lambda command=command: len(searches(command)) == 1)


def searches(command: Command) -> list[Command]:
    """Return the search processes that run for this host."""
    host: Any = getattr(command, "_on_end").__self__  # noqa: B009
    return list(host._command_registry._asides.values())


async def test_search_process_is_not_listed_as_command(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child(ECHOES, marker), stdin="pipe")
        assert await command.watch("(x)", timeout=0.01) is None
        watch = asyncio.ensure_future(command.watch("(x)"))
        await wait_pass(lambda: len(searches(command)) > 0)
        assert host.commands() == [command]
        command.stop_nowait()
        assert await watch is None
        assert await host.wait_ended() == [command]
        assert host.take_ended() == []


async def test_host_close_ends_watches(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child("be_deaf()\nsay('up')\nstay()", marker), grace=0.1)
        plain = asyncio.ensure_future(command.watch("never"))
        other = asyncio.ensure_future(command.watch("(never)"))
        await wait_said(command, "up")
        await wait_pass(lambda: any(each.pid for each in searches(command)))
    assert await plain is None
    try:
        assert await other is None
    except Closed:
        pass  # The search ended before the command that it searched.
    assert command.finished is not None
    assert command.finished.ended is Ended.HOST_CLOSED


async def test_draining_host_still_watches(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child(ECHOES, marker), stdin="pipe")
        draining = asyncio.ensure_future(host.drain())
        watch = asyncio.ensure_future(command.watch("(word)"))
        await tell(command, b"a word")
        assert await watch == Match(2, 6, b"word", ("word",), 0)
        await command.close_stdin()
        await draining


async def test_killed_search_process_is_an_error(marker: str) -> None:
    async with echoing(marker) as command:
        watch = asyncio.ensure_future(command.watch("(x)"))
        await tell(command, b"hay")
        (search,) = searches(command)
        await search.signal(9)
        await tell(command, b"hay")
        with pytest.raises(MachineError, match="killed"):
            await watch


# -- bounds ----------------------------------------------------------------------------------------------------------
@pytest.mark.thorough
async def test_endless_pattern_blocks_nobody(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_watch, "SEARCH_SECONDS_MAX", 1.0)
    monkeypatch.setattr(output_watch, "OVERTIME_SECONDS_MAX", 0.1)
    async with echoing(marker) as command:
        await tell(command, b"x" * 60_000)
        watch = asyncio.ensure_future(command.watch("(x+x+)+y"))
        rounds = 0
        while not watch.done():
            await asyncio.sleep(0)
            rounds += 1
        with pytest.raises(UsageError, match="takes longer than 1 s"):
            await watch
        # A loop that runs the search itself makes no pass. This one makes tens of thousands in that second.
        assert rounds > 100
        # With a shorter timeout the pattern is only not found in time.
        assert await command.watch("(x+x+)+y", timeout=0.1) is None


async def test_watch_of_flood_takes_linear_time(marker: str) -> None:
    code = """
piece = b"x" * 65536
for _ in range(1024):
    os.write(1, piece)
say("needle")
stay()
"""
    async with Host("memory:") as host:
        command = await start(host, child(code, marker), grace=0.1)
        for pattern in ("needle", "n(e+)dle"):
            match = await command.watch(pattern, timeout=60)
            assert match is not None
            assert (match.begin, match.missed) == (64 << 20, 0)


async def test_search_processes_are_bounded(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ASIDES_MAX", 2)
    async with echoing(marker) as command:
        two = [asyncio.ensure_future(command.watch("(x)")) for _ in range(2)]
        await wait_pass(lambda: len(searches(command)) == 2)
        with pytest.raises(Refused, match="searches"):
            await command.watch("(x)")
        plain = asyncio.ensure_future(command.watch("x"))
        await tell(command, b"x")
        assert [match and match.begin for match in await asyncio.gather(*two, plain)] == [0, 0, 0]


BAD = ["(", "a{2,1}", "(?<=a+)b", 7, None, "x" * 5000, "(" * 2000 + ")" * 2000, b"[", "(?P<1>x)"]


@pytest.mark.parametrize("pattern", BAD, ids=[str(n) for n in range(len(BAD))])
async def test_watch_refuses_invalid_pattern(pattern: Any) -> None:
    async with Host("memory:") as host:
        command = await start(host, ["sleep", "60"])
        with pytest.raises(UsageError):
            await command.watch(pattern)


@pytest.mark.parametrize("how", [{"after": -1}, {"after": True}, {"stream": "stdin"}, {"timeout": -1}, {"after": "x"}])
async def test_watch_refuses_invalid_option(how: dict[str, Any]) -> None:
    async with Host("memory:") as host:
        command = await start(host, ["sleep", "60"])
        with pytest.raises(UsageError):
            await command.watch("x", **how)


# -- the search itself -----------------------------------------------------------------------------------------------
def feed(search: PatternSearch, data: bytes, size: int, begin: int = 0) -> Any:
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        found = search.feed(piece, begin + at, at + size >= len(data))
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("pattern", "data", "wanted"),
    [
        ("ä.ü", "aäöüb".encode(), (1, "äöü".encode(), ())),
        ("[äö]{2}(ü?)", "aäöb".encode(), (1, "äö".encode(), ("",))),
        (r"\bword\W", b"sword words word.", (12, b"word.", ())),
        ("a.", "aä".encode(), (0, "aä".encode(), ())),
        (r"(?<=a)b(x)?", b"bab", (2, b"b", (None,))),
        (r"\Ab", b"ab", None),
        ("é", b"\xc3\xc3\xa9", (1, b"\xc3\xa9", ())),
        (b"\xa9", b"\xc3\xa9", (1, b"\xa9", ())),
        ("(.)x", b"\xffx", (0, b"\xffx", ("\ufffd",))),
        ("^b", b"a\nb", (2, b"b", ())),
    ],
)
def test_search_match_is_independent_of_cuts(pattern: Any, data: bytes, wanted: Any, size: int) -> None:
    found = feed(PatternSearch(pattern), data, size)
    assert found == wanted


def test_search_matches_line_start_far_from_beginning() -> None:
    search = PatternSearch("^needle")
    assert feed(search, b"x" * 5000 + b"needle" + b"x" * 5000, 1) is None
    assert feed(search, b"\nneedle", 1, begin=10_006) == (10_007, b"needle", ())


def test_search_does_not_match_across_gap() -> None:
    search = PatternSearch("needle")
    assert search.feed(b"need", 0, False) is None
    assert search.feed(b"le needle", 100, False) == (103, b"needle", ())


@pytest.mark.parametrize("size", [1000, MATCH_BYTES_MAX])
def test_search_match_may_be_as_long_as_bound(size: int) -> None:
    inner = b"x" * (MATCH_BYTES_MAX - 2)
    assert feed(PatternSearch("a[^ab]*b"), b"y" * 200_000 + b"a" + inner + b"b", size) is not None


def test_search_window_is_bounded() -> None:
    for pattern in ("needle", "n(e+)dle"):
        search = PatternSearch(pattern)
        feed(search, b"x" * 2_000_000, 65536)
        assert len(search._window) <= MATCH_BYTES_MAX + CONTEXT_BYTES  # pyright: ignore[reportPrivateUsage]


def test_is_plain_recognises_plain_patterns() -> None:
    assert all(is_plain(pattern) for pattern in ("ready", r"^port \d\d$", b"[a-z].", "\u00e4"))
    assert not any(is_plain(pattern) for pattern in ("a*", "a+", "a?", "a{9}", "a|b", "(a)", b"(?i)a", "x" * 201))


async def test_search_process_ends_with_its_host(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child("say('up')\nstay()", marker), grace=0.1)
        watch = asyncio.ensure_future(command.watch("(never)"))
        await wait_pass(lambda: any(each.pid for each in searches(command)))
        (search,) = searches(command)
        assert search.pid is not None
        with frozen_guards(search.pid):
            watch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await watch
            await command.stop(at_once=True)
            closing = asyncio.ensure_future(host.close())
            for _ in range(10):
                await asyncio.sleep(0)
            assert not closing.done()
        await closing
        assert search.finished is not None
    wait_until(lambda: search.pid not in alive("pattern_search.py"), "the end of the search")
