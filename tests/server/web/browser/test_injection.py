"""Agent output stays text in the page: it runs nothing, makes no element and requests nothing.

An agent reads web pages and repositories of strangers, so its output is untrusted.
"""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import expect
from tests.server.web.browser.tab import Tab, Visits
from tests.thorough import thorough

PWNED = "window.__pwned=1"
HTML = (
    f"<script>{PWNED}</script>",
    f'<img src=x onerror="{PWNED}">',
    f"<svg onload={PWNED}><script>{PWNED}</script></svg>",
    f'<iframe srcdoc="<script>parent.{PWNED[7:]}</script>"></iframe>',
    f'"><input autofocus onfocus="{PWNED}">',
    "<style>body { display: none }</style>",
    '<base href="https://elsewhere.invalid/">',
    '<meta http-equiv="refresh" content="0; url=https://elsewhere.invalid/">',
    f"</textarea></title></script><script>{PWNED}</script>",
    f"${{{PWNED}}} {{{{constructor.constructor('{PWNED}')()}}}}",
)
MARKDOWN = (
    f"[click me](javascript:{PWNED})",
    f"[click me]( JaVaScRiPt:{PWNED} )",
    f"[tab](java\tscript:{PWNED})",
    f"[data](data:text/html,<script>opener.{PWNED[7:]}</script>)",
    "[file](file:///etc/passwd) [vb](vbscript:msgbox)",
    "![picture](https://elsewhere.invalid/spy.png)",
    f'![a](x "onerror={PWNED}")',
    f'[title](https://elsewhere.invalid/ "\\" onmouseover={PWNED} ")',
    f"<https://elsewhere.invalid/{HTML[0]}>",
    f"| a | b |\n|---|---|\n| {HTML[1]} | [x](javascript:{PWNED}) |",
    f"```{HTML[0]}\n{HTML[1]}\n```",
    f"# {HTML[1]}\n\n> {HTML[0]}\n\n- {HTML[1]}\n\n`{HTML[0]}` **{HTML[1]}**",
    # A bidirectional override, which displays `txt.exe` as `exe.txt`.
    "\u202etxt.exe\u202c \u2066reversed\u2069 \x1b[31m\x07",
    # One line of many characters, and many marks on one character.
    "x" * 5_000 + "a" + "\u0301" * 500,
    "[" * 3000 + "*" * 3000 + "`" * 3001 + "> " * 500,
)
NASTY = "\n\n".join((*HTML, *MARKDOWN))
SHORT = "\n\n".join((*HTML, *MARKDOWN[:-2]))
# Counts elements that none of the text may make. A link in the text must have a safe target.
MADE = """() => ({
  pwned: window.__pwned ?? null,
  foreign: document.querySelectorAll(
    '[role="log"] :is(script, iframe, object, embed, style, base, meta, img[src^="http"], form)').length,
  handlers: [...document.querySelectorAll("*")]
    .flatMap((node) => [...node.attributes]).filter(({ name }) => /^on/.test(name)).length,
  links: [...document.querySelectorAll("a[href]")].map((link) => link.protocol)
    .filter((protocol) => !["http:", "https:", "mailto:"].includes(protocol)),
  unguarded: [...document.querySelectorAll('[role="log"] a[href]')].filter((link) => link.host !== location.host &&
    !(link.target === "_blank" && link.relList.contains("noopener") && link.relList.contains("noreferrer"))).length,
})"""
# Scrolls to one screen, expands and draws it, and returns whether it was the last.
OPENED = """async (log, top) => {
  let scroller = log;
  while (!/auto|scroll/.test(getComputedStyle(scroller).overflowY)) scroller = scroller.parentElement;
  scroller.scrollTop = top;
  const drawn = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  await drawn();
  for (const each of log.querySelectorAll('[aria-expanded="false"]')) each.click();
  await drawn();
  return top + scroller.clientHeight >= scroller.scrollHeight;
}"""
SCREENS_MAX = 200
CLEAN: dict[str, Any] = {"pwned": None, "foreign": 0, "handlers": 0, "links": [], "unguarded": 0}


@thorough
def test_agent_output_stays_text_in_the_page(visits: Visits) -> None:
    """In streamed and whole text, in tools, in files, in questions, in prompts and in names."""
    served = visits.served
    # The agent's script has one step per line, so a frame with several lines is given raw.
    script = {
        "prompt": [
            f"raw {_assistant({'type': 'text', 'text': NASTY + chr(0)})}",
            f"raw {_assistant({'type': 'thinking', 'thinking': SHORT, 'signature': ''})}",
            *(f"stream 2 0 {piece}" for piece in HTML),
            f"tool_use {_name(HTML[1])} {json.dumps({'command': SHORT, 'file_path': HTML[0], 'description': HTML[1]})}",
            f"tool_result {HTML[1]} {HTML[2]}",
            f"tool_use Edit {json.dumps({'file_path': HTML[1], 'old_string': HTML[0], 'new_string': SHORT})}",
            f"tool_result {HTML[0]}",
            f"ask {_name(HTML[2])} {json.dumps({'command': HTML[0], 'file_path': HTML[1]})}",
            "say The end.",
        ]
    }
    session = served.open(script, name=HTML[1])
    tab = visits.tab(session)
    tab.send(SHORT)
    expect(tab.questions).to_have_count(1)
    visits.chromium.keep("asked")
    assert tab.page.evaluate(MADE) == CLEAN
    for name in ("Why", "Queue"):
        tab.page.get_by_role("tab", name=name).click()
        expect(tab.section(name)).to_be_visible()
        assert tab.page.evaluate(MADE) == CLEAN
    tab.questions.get_by_role("button", name="Allow", exact=True).click()
    tab.wait_said("The end.")
    # The page shows the text itself.
    seen = _look_at_all(tab)
    for piece in HTML:
        assert piece in seen, piece
    assert HTML[1] in tab.page.title()


def _assistant(block: dict[str, Any]) -> str:
    message = {"id": "msg_x", "type": "message", "role": "assistant", "model": "m", "content": [block]}
    return json.dumps({"type": "assistant", "message": message, "session_id": "x", "parent_tool_use_id": None})


def _name(text: str) -> str:
    """Return the name of a tool as one word of the script."""
    return text.replace(" ", "\u00a0")


def _look_at_all(tab: Tab) -> str:
    """Scroll through the transcript, expand everything, and return all shown text."""
    seen = ""
    top = 0
    for _ in range(SCREENS_MAX):
        is_end = tab.log.evaluate(OPENED, top)
        assert tab.page.evaluate(MADE) == CLEAN
        seen += tab.log.inner_text()
        if is_end:
            return seen
        top += 400
    raise AssertionError("the transcript has no end")
