"""A real Chromium, and an eye on all that its pages do that no page of ours may.

Whatever a test is about, it fails too if a page logs an error, raises one, breaks its own Content-Security-Policy or
asks any other origin for anything. A test that takes the network away says which complaints it expects of that.

Browser and driver are started for each test and ended with it: the look round after every test counts processes, and
what a browser keeps (cookies, locks, storage) must not reach from one test into the next.
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
# Two cores, eleven tabs and a server: what is waited for is a fact, and this is only when to give up on it.
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
    # Its crash handler would be nobody's child.
    "--disable-breakpad",
    "--disable-crash-reporter",
    # A test has no network but the loopback, and no proxy of the machine's between the page and its server.
    "--no-proxy-server",
    *(("--no-sandbox",) if os.geteuid() == 0 else ()),
)
# What the browser itself says of a request that nobody answered.
LOST = r"Failed to load resource: net::ERR_|net::ERR_"


def executable() -> str:
    """Where Chromium is, as `make test` has found or installed it. A loud skip, or with CI a failure, if it is not."""
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
    """Where the screenshots of a run are kept."""
    folder = Path(os.environ.get("BANKSMAN_ARTEFACTS") or ROOT / "build" / "artefacts" / "browser")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Chromium:
    """One browser, and the complaints of all its pages. `name`: of the test, and of its screenshots."""

    def __init__(self, name: str) -> None:
        path = executable()
        self._name = name
        self._expected: list[re.Pattern[str]] = []
        self._complaints: list[str] = []
        self._origins: set[str] = set()
        self.requests: list[str] = []
        self._contexts: list[BrowserContext] = []
        # Not in the test's folder: it has sockets in there, whose paths must be short.
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
        """A browser of its own, as far as cookies, storage and locks go."""
        options = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light", **options}
        context = self.browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        context.on("console", self._heard)
        context.on("weberror", lambda error: self._complain(f"an error was raised: {error.error}"))
        context.on("request", self._asked)
        # A policy that is broken is a line of the console, but one that is only reported may not be.
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
        """From now on this is a server of ours: whatever else is asked for is a complaint."""
        self._origins.add(_origin(url))

    def expect(self, pattern: str) -> None:
        """Whoever takes the network away hears of it from the browser itself, whatever the page does."""
        self._expected.append(re.compile(pattern))

    def expect_lost_connections(self) -> None:
        self.expect(LOST)
        # What a server that is going answers, and a proxy without one.
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
        """A picture of each page as it is now. `moment`: of which one, if it is not the end."""
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
                # Not by playwright, which writes files in threads that it leaves behind.
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
