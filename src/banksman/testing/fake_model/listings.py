"""The models that there are, for agents that ask. Any other name does as well."""

from __future__ import annotations

from typing import Any

from banksman.testing.fake_model.apis import anthropic, responses

# Two vendors answer at one path. Each field is in the shape of one of them, and the other's clients pass over it.
MODELS: dict[str, Any] = {
    "object": "list",
    "data": [
        {
            "type": "model",
            "object": "model",
            "id": name,
            "display_name": "Fake",
            "owned_by": "fake",
            "created_at": "2025-01-01T00:00:00Z",
            "created": 1735689600,
        }
        for name in (anthropic.MODEL, responses.MODEL)
    ],
    "first_id": anthropic.MODEL,
    "last_id": responses.MODEL,
    "has_more": False,
}
GEMINI_MODELS: dict[str, Any] = {
    "models": [
        {
            "name": "models/gemini-fake-1",
            "version": "1",
            "displayName": "Fake",
            "inputTokenLimit": 1_048_576,
            "outputTokenLimit": 65_536,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }
    ]
}
