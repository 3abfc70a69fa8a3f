"""Web page: serve the static files of this folder.

The files are found once, at import, and each becomes a route. So a request can reach no other file,
whatever its path contains. `/` is the page, and everything else is below `/page/`. Every link in
the page is relative, so that the page works below the path prefix of a proxy.

There is no build step: the browser gets the files of the folder. It requests each file every time
(`no-cache`) and gets a 304 for an unchanged one. So the page and its modules always have the same
version. The page lists the names of all modules, so that the browser loads them in parallel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.responses import Response

from banksman.server.access.roles import Action
from banksman.server.api.route import Route, RouteCall

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"
_MODULES = b"<!-- modules -->"

# Allow resources from this origin only, and no inline scripts. With Trusted Types a browser also
# refuses to parse a string as markup, so that an agent's output cannot become markup.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yield each servable file with its path in the folder."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif _type_of(entry.name) is not None:
            yield prefix + entry.name, entry


def _type_of(name: str) -> str | None:
    return next(
        (media_type for ending, media_type in _TYPES.items() if name.endswith(ending)), None
    )


def _with_modules(page: bytes, names: list[str]) -> bytes:
    """Insert a preload link for each module into the page."""
    links = "".join(
        f'<link rel="modulepreload" href="page/{name}">\n' for name in names if name.endswith(".js")
    )
    assert page.count(_MODULES) == 1, "the page has one marker for its modules"
    return page.replace(_MODULES, links.rstrip("\n").encode())


def _has_it(given: str | None, tag: str) -> bool:
    """Whether `If-None-Match` contains this tag: one of several, weak or strong."""
    return given is not None and any(
        each.strip().removeprefix("W/") in (tag, "*") for each in given.split(",")
    )


def _route(path: str, name: str, data: bytes) -> Route:
    media_type = _type_of(name)
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def show(call: RouteCall) -> Response:
        if _has_it(call.header("if-none-match"), tag):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=media_type)

    return Route(
        method="GET",
        path=path,
        handle=show,
        summary=f"File of the web page: {name}.",
        action=Action.OPEN_TO_ALL,
    )


def _routes() -> Iterator[Route]:
    found = {name: file.read_bytes() for name, file in _files(resources.files(__name__))}
    for name, data in found.items():
        if name == _INDEX:
            yield _route("/", name, _with_modules(data, list(found)))
        else:
            yield _route(f"/page/{name}", name, data)


ROUTES = tuple(_routes())
