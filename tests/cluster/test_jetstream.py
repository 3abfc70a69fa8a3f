"""Replies to requests at one inbox: each reaches its request once, or is ignored."""

from __future__ import annotations

import asyncio

import pytest

from banksman.cluster.jetstream import PendingReplies, Unheard
from banksman.errors import Unanswered


async def test_replies_reach_their_requests_in_any_order() -> None:
    pending = PendingReplies("inbox")
    with pending.asked(60) as (one, first), pending.asked(60) as (two, second):
        pending.heard(two, b"2", None)
        pending.heard(one, b"1", {})
        pending.heard(one, b"again", None)
        assert (await first, await second) == (b"1", b"2")
    pending.heard(one, b"late", None)


async def test_request_without_a_subscriber_raises_unheard() -> None:
    pending = PendingReplies("inbox")
    with pending.asked(60) as (to, reply):
        pending.heard(to, b"", {"Status": "503"})
        with pytest.raises(Unheard):
            await reply


async def test_request_without_a_reply_in_time_raises_unanswered() -> None:
    pending = PendingReplies("inbox")
    with pending.asked(0.01) as (_, reply), pytest.raises(Unanswered):
        await reply


async def test_cancellation_that_comes_with_the_reply_is_not_lost() -> None:
    pending = PendingReplies("inbox")
    to = ""

    async def ask() -> bytes:
        nonlocal to
        with pending.asked(60) as (to, reply):
            return await reply

    task = asyncio.create_task(ask())
    await asyncio.sleep(0)
    pending.heard(to, b"1", None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
