"""The page: a few files, named here one by one. What is not named cannot be asked for."""

from __future__ import annotations

from importlib import resources

from starlette.responses import Response

from banksman.serve.api.routes import Call, Route

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    # Only what comes from here, and no script that is written into the page.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


def _route(path: str, file: str, media_type: str) -> Route:
    data = (resources.files(__name__) / file).read_bytes()

    async def show(_: Call) -> Response:
        return Response(data, headers=_HEADERS, media_type=media_type)

    return Route(method="GET", path=path, handle=show, summary=f"The page: {file}.", is_open=True)


ROUTES = tuple(_route(path, file, media_type) for path, (file, media_type) in _FILES.items())
