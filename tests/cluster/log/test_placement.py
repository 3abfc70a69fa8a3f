"""Sessions wait in queues on real servers, and exactly one host with room and the right labels takes each."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from tests.cluster.lines import SECONDS_MAX, Line, lines, stored, until

from banksman.cluster.log import placement as placement_module
from banksman.cluster.log import placement_queues as needs_module
from banksman.errors import NoOwner, Refused
from banksman.testing.nats_servers import Servers


async def take(line: Line, *labels: str) -> placement_module.PlacedJob:
    async with asyncio.timeout(SECONDS_MAX):
        return await line.placement.next(labels)


async def serve(line: Line, *labels: str, name: bytes = b"host") -> None:
    """Serve as a host without a limit that answers every placement."""
    while True:
        job = await line.placement.next(labels)
        if await job.is_wanted():
            await job.done(name + b" has " + job.request)
        else:
            await job.done()


async def is_empty(line: Line, prefix: str) -> bool:
    """Check that the queues are empty. A host acks a job without waiting for the server, so this takes a moment."""
    return await stored(line.nats, f"{prefix}-work") == 0


async def ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


async def test_placement_respects_labels(nats_one: Servers, prefix: str) -> None:
    async with lines(nats_one, prefix, 3) as (front, plain, gpu):
        hosts = [
            asyncio.create_task(serve(plain, "agent=claude", name=b"plain")),
            asyncio.create_task(serve(gpu, "agent=claude", "gpu", name=b"gpu")),
        ]
        for number in range(5):
            answer = await front.placement.place(f"s-{number}", ["gpu", "agent=claude"], b"it", timeout=SECONDS_MAX)
            assert answer == b"gpu has it"
        assert (await front.placement.place("s-6", [], b"it", timeout=SECONDS_MAX)).endswith(b" has it")
        await until(partial(is_empty, front, prefix))
        await ended(*hosts)


async def test_placement_of_a_new_need_reaches_a_waiting_host_at_once(nats_one: Servers, prefix: str) -> None:
    """The host waits already, and its lease is so long that it would not look again."""
    async with lines(nats_one, prefix, 2, lease=3600) as (front, host):
        serving = asyncio.create_task(serve(host, "a", "b", "c"))
        assert await front.placement.place("s-0", ["a"], b"1", timeout=SECONDS_MAX) == b"host has 1"
        assert await front.placement.place("s-1", ["b"], b"2", timeout=SECONDS_MAX) == b"host has 2"
        assert await front.placement.place("s-2", ["c", "b"], b"3", timeout=SECONDS_MAX) == b"host has 3"
        await ended(serving)


async def test_job_queued_before_its_host_came_is_taken(nats_one: Servers, prefix: str) -> None:
    async with lines(nats_one, prefix, 2) as (front, host):
        large = os.urandom(1 << 20)
        placing = asyncio.create_task(front.placement.place("s-1", ["gpu"], large, timeout=SECONDS_MAX))

        async def is_stored() -> bool:
            return await stored(front.nats, f"{prefix}-work") == 1

        await until(is_stored)
        job = await take(host, "gpu")
        assert (job.session, job.kind, job.request, job.need, job.deliveries) == ("s-1", "open", large, ("gpu",), 1)
        assert await job.is_wanted()
        await job.done(large + b"!")
        assert await placing == large + b"!"


async def test_job_not_taken_in_time_is_never_begun(nats_one: Servers, prefix: str) -> None:
    async with lines(nats_one, prefix, 2) as (front, host):
        with pytest.raises(NoOwner):
            await front.placement.place("s-1", ["gpu"], b"it", timeout=0.2)
        await until(partial(is_empty, front, prefix))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await host.placement.next(["gpu"])


async def test_job_taken_too_late_is_not_wanted(nats_one: Servers, prefix: str) -> None:
    """The host pulls the job before the caller's timeout and asks after it whether the job is wanted.

    The later moment counts.
    """
    async with lines(nats_one, prefix, 2) as (front, host):
        taking = asyncio.create_task(take(host, "gpu"))
        with pytest.raises(NoOwner):
            await front.placement.place("s-1", ["gpu"], b"it", timeout=0.5)
        job = await taking
        assert not await job.is_wanted()
        await job.done()


async def test_job_taken_in_time_is_awaited_beyond_the_timeout(nats_one: Servers, prefix: str) -> None:
    async with lines(nats_one, prefix, 2) as (front, host):
        placing = asyncio.create_task(front.placement.place("s-1", ["gpu"], b"it", timeout=0.5))
        job = await take(host, "gpu")
        assert await job.is_wanted()
        ended_at = time.monotonic() + 0.6
        await until(lambda: time.monotonic() > ended_at)
        await job.working()
        await job.done(b"here")
        assert await placing == b"here"


async def test_job_of_cancelled_caller_is_not_wanted(nats_one: Servers, prefix: str) -> None:
    async with lines(nats_one, prefix, 2) as (front, host):
        placing = asyncio.create_task(front.placement.place("s-1", ["gpu"], b"it", timeout=SECONDS_MAX))
        job = await take(host, "gpu")
        await ended(placing)
        assert not await job.is_wanted()
        await job.done()


async def test_resume_from_many_hosts_makes_one_job(nats_one: Servers, prefix: str) -> None:
    async with lines(nats_one, prefix, 3) as every:
        async with asyncio.TaskGroup() as group:
            for line in every:
                for _ in range(5):
                    group.create_task(line.placement.resume("s-1", ["agent=claude"], 7))
        assert await stored(every[0].nats, f"{prefix}-work") == 1
        job = await take(every[0], "agent=claude")
        assert (job.session, job.kind, job.epoch, job.request) == ("s-1", "resume", 7, b"")
        # Also while a host works on the job.
        await every[1].placement.resume("s-1", ["agent=claude"], 7)
        assert await stored(every[0].nats, f"{prefix}-work") == 1
        assert await job.is_wanted()
        await job.done()
        await until(partial(is_empty, every[0], prefix))
        # When the session is lost again, there is another job.
        await every[1].placement.resume("s-1", ["agent=claude"], 8)
        assert (await take(every[2], "agent=claude")).epoch == 8


async def test_job_given_back_is_redelivered_after_its_delay(nats_one: Servers, prefix: str) -> None:
    async with lines(nats_one, prefix, 2) as (one, other):
        await one.placement.resume("s-1", [], 1)
        job = await take(one)
        began = time.monotonic()
        await job.again(0.4)
        again = await take(other)
        assert again.session == "s-1"
        assert again.deliveries == 2
        assert time.monotonic() - began > 0.3


async def test_cancelled_pull_passes_its_job_on_at_once(
    nats_one: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers the pull of the cancelled host first, and that host passes the job on immediately."""
    monkeypatch.setattr(needs_module, "ACK_SECONDS", 60.0)
    async with lines(nats_one, prefix, 3, lease=60) as (front, gone, host):
        await front.placement.resume("s-0", [], 1)
        await (await take(gone)).done()
        for number in range(10):
            waiting = asyncio.create_task(gone.placement.next([]))
            pulls = placement_module.ClusterPlacement.__name__
            await until(lambda: gone.placement._asked, f"{pulls} has not asked")  # pyright: ignore[reportPrivateUsage]
            await ended(waiting)
            began = time.monotonic()
            await front.placement.resume(f"s-{number}", [], 2)
            job = await take(host)
            assert job.session == f"s-{number}"
            await job.done()
            assert time.monotonic() - began < needs_module.ACK_SECONDS / 2


async def test_jobs_are_taken_once_by_many_hosts(nats_one: Servers, prefix: str) -> None:
    async with lines(nats_one, prefix, 4) as (front, *hosts):
        for number in range(30):
            await front.placement.resume(f"s-{number}", ["x"], 1)
        taken: list[str] = []

        async def host(line: Line) -> None:
            while True:
                job = await line.placement.next(["x", "y"])
                taken.append(job.session)
                await job.done()

        tasks = [asyncio.create_task(host(line)) for line in hosts]
        await until(lambda: len(taken) >= 30)
        await ended(*tasks)
        assert sorted(taken) == sorted(f"s-{number}" for number in range(30))


async def test_needs_are_bounded_in_number(nats_one: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs_module, "NEEDS_MAX", 2)
    async with lines(nats_one, prefix, 2) as (one, other):
        await one.placement.resume("s-1", ["a"], 1)
        await one.placement.resume("s-2", ["b"], 1)
        with pytest.raises(Refused, match="different label sets"):
            await other.placement.resume("s-3", ["c"], 1)
        await other.placement.resume("s-3", ["a"], 1)


async def test_unused_need_expires_and_makes_room(
    nats_one: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs_module, "NEEDS_MAX", 1)
    async with lines(nats_one, prefix, 2, lease=0.2) as (one, other):
        await one.placement.resume("s-1", ["a"], 1)
        await (await take(one, "a", "b")).done()
        with pytest.raises(Refused, match="different label sets"):
            await other.placement.resume("s-2", ["b"], 1)
        record = await one.nats.last(f"{prefix}-records", f"{prefix}.rec.need.*")
        assert record is not None
        assert record.headers["Nats-TTL"] == f"{needs_module.KEPT_SECONDS}s"
        # As the servers do when the record expires.
        await one.nats.api(f"STREAM.PURGE.{prefix}-records", {"filter": record.subject})
        await other.placement.resume("s-2", ["b"], 1)
        # The host believed that there was no room for this need. It looks again once per lease.
        assert (await take(one, "a", "b")).session == "s-2"


async def test_need_expiry_is_postponed_by_use(nats_one: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offer renews the need at intervals, and always after a reconnect: the time away was not measured."""
    async with lines(nats_one, prefix, 1) as (one,):

        async def seq() -> int:
            record = await one.nats.last(f"{prefix}-records", f"{prefix}.rec.need.*")
            assert record is not None
            return record.seq

        await one.placement.resume("s-1", ["a"], 1)
        first = await seq()
        await one.placement.resume("s-1", ["a"], 2)
        assert await seq() == first
        one.placement.on_up()
        await one.placement.resume("s-1", ["a"], 3)
        assert await seq() == first + 1
        monkeypatch.setattr(needs_module, "USED_SECONDS", 0)
        await one.placement.resume("s-1", ["a"], 4)
        assert await seq() == first + 2


async def test_job_in_an_abandoned_queue_is_taken(
    nats_one: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a host that knows the queue from before, and by a host that has just come."""
    monkeypatch.setattr(placement_module, "AGAIN_SECONDS", 0.05)
    async with lines(nats_one, prefix, 3, lease=3600) as (front, host, late):
        await front.placement.resume("s-0", ["a"], 1)
        await (await take(host, "a")).done()
        (key,) = front.placement._needs._all  # pyright: ignore[reportPrivateUsage]
        for number, line in enumerate((host, late), 1):
            await until(partial(is_empty, front, prefix))
            assert (await front.nats.api(f"CONSUMER.DELETE.{prefix}-work.{key}", {}))["success"]
            await front.placement.resume(f"s-{number}", ["a"], 1)
            job = await take(line, "a")
            assert job.session == f"s-{number}"
            await job.done()


@pytest.mark.thorough
async def test_need_and_its_queue_expire_by_themselves(
    nats_one: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs_module, "KEPT_SECONDS", 1)
    async with lines(nats_one, prefix, 2) as (front, host):
        await front.placement.resume("s-1", ["a"], 1)
        await (await take(host, "a")).done()

        async def is_forgotten() -> bool:
            return await stored(front.nats, f"{prefix}-records") == 0

        async def has_no_queue() -> bool:
            found = await front.nats.api(f"STREAM.INFO.{prefix}-work", {})
            return found["state"]["consumer_count"] == 0

        await until(is_forgotten)
        await until(lambda: not host.placement._needs.satisfied(frozenset("a")))  # pyright: ignore[reportPrivateUsage]
        await until(has_no_queue)
        monkeypatch.setattr(needs_module, "USED_SECONDS", 0)
        await front.placement.resume("s-2", ["a"], 1)
        assert (await take(host, "a")).session == "s-2"


async def test_waiting_host_pulls_again_when_its_server_restarts(prefix: str) -> None:
    """The pull died with the server, and the lease is so long that the host would not pull again."""
    with Servers(1) as servers:
        async with lines(servers, prefix, 2, lease=3600) as (front, host):
            serving = asyncio.create_task(serve(host, "a"))
            assert await front.placement.place("s-0", ["a"], b"1", timeout=SECONDS_MAX) == b"host has 1"
            # The host has sent its next pull. The answer of the server to this call proves that the server has the
            # pull.
            await until(lambda: host.placement._asked)  # pyright: ignore[reportPrivateUsage]
            await stored(host.nats, f"{prefix}-work")
            await asyncio.to_thread(servers.kill, 0)
            await until(lambda: not host.nats.is_up)
            await asyncio.to_thread(servers.restart, 0)
            assert await front.placement.place("s-1", ["a"], b"2", timeout=SECONDS_MAX) == b"host has 2"
            await ended(serving)
