"""The four model APIs, one file for the shape of each; `api` has what they have in common."""

from __future__ import annotations

import re

from banksman.testing.fake_model.apis import anthropic, chat, gemini, responses
from banksman.testing.fake_model.apis.api import Api

# An agent is given a base address of ours with or without something before the version, as its API is used to.
_PATHS = {
    "/v1/messages": anthropic.API,
    "/v1/responses": responses.API,
    "/v1/chat/completions": chat.API,
}
_GEMINI = re.compile(r"/v1(?:beta)?/models/[^/:]+:(?:generate|streamGenerate)Content\Z")


def find(method: str, path: str) -> Api | None:
    """The API by which this request wants a reply of the model; None for every other request."""
    if method != "POST":
        return None
    if _GEMINI.search(path):
        return gemini.API
    return next((api for end, api in _PATHS.items() if path.endswith(end)), None)
