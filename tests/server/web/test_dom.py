"""The module that writes the document, in a real browser: made nodes, refused attributes, and kept focus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import Served
from tests.server.web.browser.chromium import Chromium
from tests.thorough import thorough


class Dom:
    """Runs code in the page.

    `run`: takes the body of a function that has `dom`, and `place`, an empty element of the document.
    """

    def __init__(self, chromium: Chromium, served: Served) -> None:
        chromium.belongs(served.url)
        self._page = chromium.context().new_page()
        # The page itself, with its policy.
        self._page.goto(served.link())
        self._page.wait_for_selector("[data-connection=live]")

    def run(self, body: str) -> Any:
        return self._page.evaluate(
            "async () => { const dom = await import('/page/dom.js'); const place = document.createElement('div');"
            f" document.body.append(place); try {{ {body} }} finally {{ place.remove() }} }}"
        )


@pytest.fixture
def dom(tmp_path: Path) -> Iterator[Dom]:
    with Served(tmp_path / "served") as served:
        chromium = Chromium("dom")
        try:
            yield Dom(chromium, served)
        finally:
            chromium.close()
        assert not chromium.complaints, chromium.complaints


def test_dom_escapes_text_and_refuses_executable_attributes(dom: Dom) -> None:
    made = dom.run(
        "return dom.el('p', {class: 'a'}, '<img src=x onerror=alert(1)>', 7, null, [['x'], false]).outerHTML"
    )
    assert made == '<p class="a">&lt;img src=x onerror=alert(1)&gt;7x</p>'
    for name in ("innerHTML", "outerHTML", "onclick", "ONCLICK", "srcdoc"):
        said = dom.run(
            f"try {{ dom.el('div', {{{name}: 'x'}}); return 'made' }} catch (error) {{ return error.message }}"
        )
        assert "cannot set " in said, name
    for address in (
        *("javascript:alert(1)", " javascript:x", "java\\tscript:x", "JavaScript:x", "\\x01javascript:x"),
        *("data:text/html,x", "vbscript:x", "data:image/svg+xml,x", "file:///etc/passwd"),
    ):
        assert dom.run(f"return dom.el('a', {{href: '{address}'}}).hasAttribute('href')") is False, address
    for address in ("https://a.example/", "http://a", "mailto:a@b", "#/s/x", "v1/x", "/x", "?x=y:z", "./a:b", "blob:x"):
        assert dom.run(f"return dom.el('a', {{href: '{address}'}}).getAttribute('href')") == address
    # Props are set as properties where the element has one, otherwise as attributes.
    made = dom.run(
        "const e = dom.el('input', {value: 'v', disabled: true, hidden: false, 'aria-label': 'l', 'aria-hidden': false,"
        " title: null, dataset: {a: 1, b: null}, style: {color: 'red'}, list: 'x'});"
        " return [e.value, e.disabled, e.hidden, e.getAttribute('aria-hidden'), e.hasAttribute('title'), e.dataset.a,"
        " 'b' in e.dataset, e.style.color, e.getAttribute('list')]"
    )
    assert made == ["v", True, False, "false", False, "1", False, "red", "x"]
    assert (
        dom.run("return dom.svg('rect', {x: 1, class: 'c', hidden: null}).outerHTML") == '<rect x="1" class="c"></rect>'
    )
    # Each browser takes seconds to start, so small checks share one.
    clicked = "let n = 0; const b = dom.el('button', {on: {click: () => n++}}); b.click(); return n"
    assert dom.run(clicked) == 1


@thorough
def test_dom_keyed_keeps_nodes_of_the_same_key_and_their_focus(dom: Dom) -> None:
    found = dom.run(
        "const make = (x) => dom.el('input', {id: 'i' + x}); const ids = () => [...place.children].map((n) => n.id);"
        " let blurred = 0; const show = (...all) => { dom.keyed(place, all, (x) => x, make); return ids(); };"
        " show(1, 2, 3, 4); const two = place.children[1]; two.focus(); two.addEventListener('blur', () => blurred++);"
        " const seen = [show(4, 3, 2, 1), show(2, 5, 4), show(9, 8, 2), show(2, 1, 3)];"
        " return [seen, place.children[0] === two, document.activeElement.id, blurred, show()]"
    )
    seen = [["i4", "i3", "i2", "i1"], ["i2", "i5", "i4"], ["i9", "i8", "i2"], ["i2", "i1", "i3"]]
    assert found == [seen, True, "i2", 0, []]
    # A key belongs to one item, and every node is updated.
    said = dom.run("try { dom.keyed(place, [1, 1], (x) => x, () => dom.el('p')) } catch (e) { return e.message }")
    assert "two items have the key 1" in said
    found = dom.run(
        "const update = (n, x) => { n.textContent = x.t; };"
        " const show = (all) => dom.keyed(place, all, (x) => x.id, () => dom.el('p'), update);"
        " show([{id: 1, t: 'a'}, {id: 2, t: 'b'}]); const one = place.children[0]; show([{id: 1, t: 'c'}]);"
        " return [one === place.children[0], place.textContent]"
    )
    assert found == [True, "c"]
