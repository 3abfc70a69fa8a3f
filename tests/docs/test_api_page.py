"""docs/api.md names every public name of the drop-ins."""

from __future__ import annotations

import importlib

import pytest
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", ["banksman.acp", "banksman.asyncio", "banksman.claude_sdk"])
def test_api_page_has_every_own_name_of_drop_in(name: str) -> None:
    module = importlib.import_module(name)
    # The others, such as PIPE, are those of the standard library.
    own = [public for public in module.__all__ if getattr(getattr(module, public), "__module__", "").startswith(name)]
    assert own
    assert [public for public in own if f"::: {name}.{public}" not in PAGE] == []
