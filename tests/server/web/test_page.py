"""Files of the page as served: their headers, and no file beyond them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.server.kit import Served, head, statuses, talk

from banksman.server import web
from banksman.server.web import POLICY, ROUTES

FOLDER = Path(web.__file__).parent
PATHS = [route.path for route in ROUTES]
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
# Namespaces are names that look like addresses. No browser requests them.
NAMES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", "http://www.w3.org/1999/xhtml"}


def files(*endings: str) -> list[Path]:
    return sorted(file for file in FOLDER.rglob("*") if file.suffix in endings)


def test_page_files_are_served_to_everybody_with_their_type(served: Served) -> None:
    found = files(".html", ".css", ".js", ".svg")
    assert len(found) == len(PATHS) > 10
    for file in found:
        name = file.relative_to(FOLDER).as_posix()
        path = "/" if name == "index.html" else f"/page/{name}"
        answer = served.request("GET", path, token=False)
        assert answer.status == 200, path
        assert answer.headers["content-type"] == TYPES.get(file.suffix, "text/html; charset=utf-8"), path
        if name != "index.html":
            assert answer.body == file.read_bytes(), path


def test_page_files_carry_the_content_security_policy(served: Served) -> None:
    for path in PATHS:
        headers = served.request("GET", path, token=False).headers
        assert headers["content-security-policy"] == POLICY, path
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["x-frame-options"] == "DENY", path
        assert headers["referrer-policy"] == "no-referrer", path
        assert headers["cross-origin-opener-policy"] == "same-origin", path
        assert headers["cache-control"] == "no-cache", path
    assert "unsafe" not in POLICY
    assert "*" not in POLICY
    for rule in ("default-src 'none'", "script-src 'self'", "require-trusted-types-for 'script'", "frame-ancestors"):
        assert rule in POLICY


def test_page_files_are_not_sent_again_with_a_matching_etag(served: Served) -> None:
    for path in PATHS:
        tag = served.request("GET", path, token=False).headers["etag"]
        for given in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            again = served.request("GET", path, token=False, headers={"If-None-Match": given})
            assert (again.status, again.body) == (304, b""), (path, given)
            assert again.headers["etag"] == tag, path
        other = served.request("GET", path, token=False, headers={"If-None-Match": '"other"'})
        assert other.status == 200, path
    tags = {served.request("GET", path, token=False).headers["etag"] for path in PATHS if path.endswith(".js")}
    assert len(tags) == len([path for path in PATHS if path.endswith(".js")])


ELSEWHERE = (
    *("/page", "/page/", "/page/index.html", "/index.html", "/page/__init__.py", "/page/__pycache__", "/page/net"),
    *("/page/net/", "/page/../main.py", "/page/%2e%2e/main.py", "/page/..%2fmain.py", "/page/net/../main.js"),
    *("/page//main.js", "/page/main.js/", "/page/main.js%00", "/page/MAIN.JS", "/PAGE/main.js", "/page/net%2fapi.js"),
    *("/page/main.js.map", "/page/.git/config", "/page//etc/passwd", "/favicon.ico", "/page/../../pyproject.toml"),
)


def test_page_paths_outside_the_folder_are_refused(served: Served) -> None:
    for path in ELSEWHERE:
        said = talk(served.port, head(f"GET {path} HTTP/1.1", port=served.port))
        assert statuses(said) == [404], path
        # A client without a token does not even learn that the path is missing.
        said = talk(served.port, head(f"GET {path} HTTP/1.1", port=served.port, token=False))
        assert statuses(said) == [401], path


def test_page_index_names_only_files_that_are_served(served: Served) -> None:
    text = served.request("GET", "/", token=False).body.decode()
    named = re.findall(r'(?:href|src)="([^"]+)"', text)
    assert {f"/{name}" for name in named} <= set(PATHS), "relative, and found"
    modules = re.findall(r'<link rel="modulepreload" href="([^"]+)">', text)
    assert {f"/{name}" for name in modules} == {path for path in PATHS if path.endswith(".js")}
    sheets = re.findall(r'<link rel="stylesheet" href="([^"]+)">', text)
    assert {f"/{name}" for name in sheets} == {path for path in PATHS if path.endswith(".css")}
    # The policy would block these silently.
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)


def test_page_modules_import_existing_files_by_relative_paths() -> None:
    for file in files(".js"):
        for name in re.findall(r"""(?:from|import)\s*\(?\s*["']([^"']+)["']""", code_of(file)):
            assert name.startswith("."), (file.name, name)
            assert (file.parent / name).resolve().is_file(), (file.name, name)


def test_page_files_name_no_foreign_address() -> None:
    for file in files(".html", ".css", ".js", ".svg"):
        for address in re.findall(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s"'`)]*""", code_of(file)):
            assert address in NAMES, (file.name, address)
        assert not re.search(r"@import|url\(\s*['\"]?(?!data:|#)", code_of(file)) or file.suffix == ".js", file.name


def test_page_modules_make_no_markup_or_code_from_text() -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|createContextualFragment|srcdoc"
    )
    for file in files(".js"):
        if file.name != "dom.js":  # That module names some of these in order to refuse them.
            assert not re.search(forbidden, code_of(file), re.IGNORECASE), file.name


def code_of(file: Path) -> str:
    """Return the code without whole-line comments, which may contain any name."""
    return re.sub(r"^\s*(?://|\*|/\*).*$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
