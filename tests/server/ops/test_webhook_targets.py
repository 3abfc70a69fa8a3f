"""Which URLs the settings accept as webhooks, and which resolved addresses a request may go to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext

import pytest

from banksman import UsageError
from banksman.server.ops.webhook_delivery import Delivery, DeliveryFailed, attempt
from banksman.server.ops.webhook_targets import TARGETS_MAX, WebhookTarget, targets_of
from banksman.server.server_settings import ServerSettings

NAME, NETWORK = "hooks.example.org", "10.1.0.0/16"
DELIVERY = Delivery("s-1/1.1", "turn.ended", b"{}")
ALLOWED = (NAME, NETWORK, "2001:db8::/32")


def target(url: str, *hosts: str) -> WebhookTarget:
    [found] = targets_of([url], hosts)
    return found


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("https://hooks.example.org/x", ()),
        ("https://hooks.example.org.evil.example/x", (NAME,)),
        ("http://hooks.example.org/x", (NAME,)),
        ("http://169.254.169.254/latest/meta-data", (NAME,)),
        ("https://10.2.0.1/x", ALLOWED),
        ("http://0.0.0.0:9000/", ()),
        ("http://[::ffff:10.2.0.1]/", ALLOWED),
        ("http://2130706433/", ()),
        ("ftp://127.0.0.1/x", ()),
        ("http://user:pass@127.0.0.1/x", ()),
        ("http://127.0.0.1/x#part", ()),
        ("http://127.0.0.1:99999/x", ()),
        ("http://127.0.0.1/x\r\nHost: other", ()),
        ("http:///x", ()),
        ("127.0.0.1", ()),
        ("https://hooks.example.org/x", ("https://hooks.example.org",)),
        ("https://hooks.example.org/x", ("10.1.0.1/16",)),
    ],
)
def test_settings_refuse_a_target_that_no_address_permits(url: str, hosts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        ServerSettings(webhooks=[url], webhook_hosts=[*hosts])
    # The path and the password of a URL may be secret.
    assert "pass" not in str(caught.value).replace("pass ", "")
    assert "/x" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "address", "is_permitted"),
    [
        ("http://127.0.0.1:9000/", "127.0.0.1", True),
        ("http://[::1]:9000/", "::1", True),
        ("http://localhost:9000/", "127.0.0.1", True),
        # A listed name must lead to a public address.
        ("https://hooks.example.org/", "93.184.216.34", True),
        ("https://hooks.example.org/", "127.0.0.1", False),
        ("https://hooks.example.org/", "::1", False),
        ("https://hooks.example.org/", "::ffff:127.0.0.1", False),
        ("https://hooks.example.org/", "169.254.169.254", False),
        ("https://hooks.example.org/", "192.168.1.1", False),
        ("https://hooks.example.org/", "fe80::1%eth0", False),
        ("https://HOOKS.example.org./", "93.184.216.34", True),
        # A listed network permits any name, and http.
        ("http://build.internal/", "10.1.2.3", True),
        ("http://build.internal/", "10.2.2.3", False),
        ("http://build.internal/", "93.184.216.34", False),
        ("http://build.internal/", "127.0.0.1", False),
        ("http://build.internal/", "2001:db8::7", True),
        ("https://hooks.example.org/", "10.1.2.3", True),
    ],
)
def test_target_permits_an_address_by_its_name_and_network(url: str, address: str, is_permitted: bool) -> None:
    assert target(url, *ALLOWED).permits(address) is is_permitted


def test_label_of_a_target_names_it_without_its_path() -> None:
    urls = ["http://127.0.0.1:9000/a?key=k", "http://127.0.0.1:9000/b", "https://[::1]/c"]
    labels = [found.label for found in targets_of(urls, ())]
    assert labels == ["http://127.0.0.1:9000", "http://127.0.0.1:9000#2", "https://[::1]:443"]
    assert ServerSettings(webhooks=urls).shown()["webhooks"] == labels


def test_settings_refuse_too_many_targets_twice_the_same_and_unknown_events() -> None:
    many = [f"http://127.0.0.1:9000/{number}" for number in range(TARGETS_MAX + 1)]
    assert len(ServerSettings(webhooks=many[1:]).webhook_targets()) == TARGETS_MAX
    with pytest.raises(UsageError, match="too many webhooks"):
        ServerSettings(webhooks=many)
    with pytest.raises(UsageError, match="twice"):
        ServerSettings(webhooks=[many[0], many[0]])
    with pytest.raises(UsageError, match="webhook_events cannot contain"):
        ServerSettings(webhook_events=["turn.started"])


async def test_request_goes_to_no_address_that_the_target_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        # The resolver reads it as 127.0.0.1, without a request to any server.
        name = target(f"https://127.1:{listener.getsockname()[1]}/", "127.1")
        with pytest.raises(DeliveryFailed, match="resolves to no permitted address"):
            await attempt(name, DELIVERY, "key")
        with pytest.raises(BlockingIOError):
            listener.accept()


# -- delivery ----------------------------------------------------------------------------------------------------------
@asynccontextmanager
async def answering(response: bytes) -> AsyncGenerator[int]:
    """Answer each request on 127.0.0.1 with these bytes; yield the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_request_goes_to_the_next_address_when_the_first_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int, **_: object) -> list[object]:
        return [(0, 0, 0, "", (address, port)) for address in ("192.0.2.1", "::1", "127.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    async with answering(b"HTTP/1.1 204 No Content\r\n\r\n") as port:
        await attempt(target(f"http://localhost:{port}/"), DELIVERY, "secret")


async def test_interim_responses_are_skipped() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\n"
    for response, error in (
        (interim * 2 + b"HTTP/1.1 200 OK\r\n\r\n", None),
        (interim + b"HTTP/1.1 500 Failed\r\n\r\n", "status 500"),
        (interim, "the response is not HTTP"),
        (interim * 9 + b"HTTP/1.1 200 OK\r\n\r\n", "the response is not HTTP"),
    ):
        async with answering(response) as port:
            with nullcontext() if error is None else pytest.raises(DeliveryFailed, match=error):
                await attempt(target(f"http://127.0.0.1:{port}/"), DELIVERY, "secret")
