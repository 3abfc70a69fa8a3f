"""Real Chromium that records every forbidden action of its pages.

A test also fails if a page logs an error, raises one, violates its Content-Security-Policy or requests another origin.
A test that disconnects the network declares the complaints that it expects.

Browser and driver start and end with each test. The leak check after every test counts processes, and the state of a
browser (cookies, locks, storage) must not reach the next test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    BrowserContext,
    ConsoleMessage,
    Error,
    Page,
    Playwright,
    Request,
    sync_playwright,
)

ROOT = Path(__file__).resolve().parents[4]
# Two cores, eleven tabs and a server: each wait is for a fact, and this is only the timeout.
PATIENCE_MS = 30_000
TABS_MAX = 16
ARGUMENTS = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Its crash handler would become an orphan.
    "--disable-breakpad",
    "--disable-crash-reporter",
    # A test has only the loopback interface, and no proxy of the machine between the page and its server.
    "--no-proxy-server",
    *(("--no-sandbox",) if os.geteuid() == 0 else ()),
)
# The browser's own message about an unanswered request.
LOST = r"Failed to load resource: net::ERR_|net::ERR_"


def executable() -> str:
    """Return the path of Chromium, as `make test` has found or installed it.

    If it is missing, the test is skipped loudly, or fails in CI.
    """
    found = subprocess.run(
        [sys.executable, "-c", "import chromium; print(chromium.find() or '')"],
        cwd=ROOT / "tools",
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not found:
        pytest.skip("NO CHROMIUM: this browser test shows nothing; `python3 tools/chromium.py` says what to do")
    return found


def artefacts() -> Path:
    """Return the folder for the screenshots of a run."""
    folder = Path(os.environ.get("BANKSMAN_ARTEFACTS") or ROOT / "build" / "artefacts" / "browser")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Chromium:
    """One browser, and the complaints of all its pages.

    `name`: the name of the test and of its screenshots.
    """

    def __init__(self, name: str) -> None:
        path = executable()
        self._name = name
        self._expected: list[re.Pattern[str]] = []
        self._complaints: list[str] = []
        self._origins: set[str] = set()
        self.requests: list[str] = []
        self._contexts: list[BrowserContext] = []
        # Not in the test's folder: the browser makes sockets in there, whose paths must be short.
        self._home = tempfile.TemporaryDirectory(prefix="b-", ignore_cleanup_errors=True)
        home = self._home.name
        env = {
            "HOME": home,
            "TMPDIR": home,
            "XDG_CONFIG_HOME": home,
            "XDG_CACHE_HOME": home,
            "PATH": os.environ["PATH"],
        }
        env.update(LANG="C.UTF-8", TZ="UTC")
        self._driver = sync_playwright()
        playwright: Playwright = self._driver.start()
        try:
            self.browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS), env=dict(env))
        except BaseException:
            self._driver.__exit__(None, None, None)
            self._home.cleanup()
            raise

    # -- pages -------------------------------------------------------------------------------------------------------
    def context(self, **options: Any) -> BrowserContext:
        """Return a context with separate cookies, storage and locks."""
        options = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light", **options}
        context = self.browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        context.on("console", self._heard)
        context.on("weberror", lambda error: self._complain(f"an error was raised: {error.error}"))
        context.on("request", self._asked)
        # The console shows a violated policy, but perhaps not one that is only reported.
        context.add_init_script(
            "addEventListener('securitypolicyviolation', (event) => "
            "console.error(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`))"
        )
        self._contexts.append(context)
        return context

    @property
    def pages(self) -> list[Page]:
        return [page for context in self._contexts for page in context.pages]

    # -- complaints --------------------------------------------------------------------------------------------------
    def belongs(self, url: str) -> None:
        """Allow the origin of this server. Every request to another origin is a complaint."""
        self._origins.add(_origin(url))

    def expect(self, pattern: str) -> None:
        """Expect a complaint. The browser itself reports a lost network, whatever the page does."""
        self._expected.append(re.compile(pattern))

    def expect_lost_connections(self) -> None:
        self.expect(LOST)
        # The answer of a closing server, and of a proxy without a server.
        self.expect(r"the server responded with a status of (502|503)")

    @property
    def complaints(self) -> list[str]:
        return [said for said in self._complaints if not any(known.search(said) for known in self._expected)]

    def _complain(self, said: str) -> None:
        self._complaints.append(said[:500])

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._complain(f"console {message.type}: {message.text} ({message.location.get('url')})")

    def _asked(self, request: Request) -> None:
        self.requests.append(request.url)
        if _origin(request.url) not in self._origins and not request.url.startswith(("data:", "blob:")):
            self._complain(f"a request to elsewhere: {request.url}")

    # -- the end -----------------------------------------------------------------------------------------------------
    def keep(self, moment: str = "") -> None:
        """Take a screenshot of each page. `moment`: its name, unless it is the end of the test."""
        name = f"{self._name}-{moment}" if moment else self._name
        for number, page in enumerate(self.pages):
            suffix = "" if number == 0 else f"-{number + 1}"
            if number >= 3:
                return  # Ten tabs look alike.
            try:
                picture = page.screenshot(animations="disabled", timeout=10_000)
            except Error as error:
                self._complain(f"no picture could be made of it: {error}")
            else:
                # Not by playwright, whose threads for files outlive the call.
                (artefacts() / f"{name}{suffix}.png").write_bytes(picture)

    def close(self) -> None:
        try:
            self.browser.close()
        finally:
            self._driver.__exit__(None, None, None)
            self._home.cleanup()


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
