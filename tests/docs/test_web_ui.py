"""Follow docs/how-to/web-ui.md: its commands, its gateway and its page, with HTTP and in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.docs.blocks import SECONDS_MAX, Place, Shell, blocks, commands
from tests.thorough import thorough

from banksman.testing import fake_agent

PAGE = "docs/how-to/web-ui.md"
QUESTION = '@@ask Bash {"command": "ls"}'


@contextmanager
def gateway(folder: Path) -> Generator[str]:
    """Type the commands of the page beside its two files. Yield the address of the gateway."""
    found = {block.language: block for block in blocks() if block.page == PAGE}
    assert found.keys() == {"sh", "python", "html"}
    place = Place(folder)
    place.agent("claude", fake_agent.command(memory=folder / "memory"))
    (place.work / "gateway.py").write_text(found["python"].text, encoding="utf-8")
    (place.work / "page.html").write_text(found["html"].text, encoding="utf-8")
    printed = ""
    with Shell(place) as shell:
        for command in commands(found["sh"]):
            command.typed = command.typed.replace("--port 8000", "--port 0")
            printed += shell.run(command)
        (address,) = re.findall(r"Uvicorn running on \S*?(http://[\d.:]+)", printed)
        yield address


@pytest.mark.thorough
def test_web_ui_gateway_relays_a_turn(tmp_path: Path) -> None:
    with gateway(tmp_path / "home") as address, httpx.Client(base_url=address, timeout=SECONDS_MAX) as client:
        assert "EventSource" in client.get("/").text
        assert client.post("/chats/1/turns", json={"prompt": "hello"}).status_code == 403
        early = client.post("/chats/2/turns", json={"prompt": "hello"}, headers={"Idempotency-Key": "2"})
        assert early.status_code == 202, f"a prompt that came before the stream of its page: {early.text}"
        with client.stream("GET", "/chats/1/events") as stream:
            asked = client.post("/chats/1/turns", json={"prompt": "hello"}, headers={"Idempotency-Key": "1"})
            assert asked.status_code == 202, asked.text
            for line in stream.iter_lines():
                if line.startswith("data: ") and json.loads(line[6:])["kind"] == "turn.ended":
                    assert json.loads(line[6:])["body"]["text"] == "hello"
                    break


@thorough
def test_web_ui_page_shows_the_turn_in_a_browser(tmp_path: Path) -> None:
    from playwright.sync_api import expect
    from tests.server.web.browser.chromium import PATIENCE_MS, Chromium

    chromium = Chromium("web-ui-how-to")
    try:
        with gateway(tmp_path / "home") as address:
            chromium.belongs(address)
            chromium.expect("favicon.ico")
            page = chromium.context().new_page()
            page.goto(address)
            for prompt, answer in (("hello", "> hello\nhello\n"), (QUESTION, f"> {QUESTION}\nallow Bash")):
                page.locator("input").fill(prompt)
                page.locator("input").press("Enter")
                expect(page.locator("#log")).to_contain_text(answer, timeout=PATIENCE_MS)
            page.get_by_role("button", name="allow Bash").click()
            expect(page.get_by_role("button")).to_have_count(0, timeout=PATIENCE_MS)
            # The gateway ends when no page is open.
            page.close()
        assert not chromium.complaints, "\n".join(chromium.complaints)
    finally:
        chromium.close()
