"""Usage limits, retries and failures of the provider, as the page shows them."""

from __future__ import annotations

import json
import re
import time

from playwright.sync_api import expect
from tests.server.web.browser.tab import Visits
from tests.thorough import thorough

pytestmark = thorough

RETRY = {"type": "system", "subtype": "api_retry", "attempt": 3, "max_retries": 10, "retry_delay_ms": 600_000}
LIMITED = {"is_error": True, "terminal_reason": "api_error", "api_error": "usage_limit_reached", "result": "limited"}


def test_limited_session_says_until_when_and_how_many_asks_wait(visits: Visits) -> None:
    served, until = visits.served, int(time.time()) + 7200
    window = {"utilization": 1, "resetsAt": until, "status": "rejected"}
    frame = {"type": "rate_limit_event", "rate_limit_info": {"unifiedWindows": {"five_hour": window}}}
    session = served.open(name="limited")
    served.outcome(session, served.ask(session, f"@@raw {json.dumps(frame)}\n@@boundary {json.dumps(LIMITED)}"))
    tab = visits.tab(session)
    expect(tab.items("ended")).to_contain_text("usage limit")
    expect(tab.items("ended")).to_contain_text("wait until `limited_until`")
    expect(tab.page.locator(".limited")).to_have_text(re.compile(r"^limited until \d\d:\d\d$"))
    running = served.ask(session, "@@hang")
    for number in range(3):
        served.ask(session, f"later {number}")
    row = tab.page.locator(f'[data-session="{session}"]')
    expect(row).to_contain_text(re.compile(r"limited until \d\d:\d\d, 3 asks wait"))
    expect(tab.page.locator(".limited")).to_have_text(re.compile(r"^limited until \d\d:\d\d, 3 asks wait$"))
    served.post(f"/v1/sessions/{session}/turns/{running}/interrupt", {})
    # The next ask is answered, so the limit is over.
    expect(tab.page.locator(".limited")).to_have_count(0)
    expect(row).not_to_contain_text("limited until")


def test_session_that_waits_for_a_limit_says_so(visits: Visits) -> None:
    served, until = visits.served, int(time.time()) + 7200
    window = {"utilization": 1, "resetsAt": until, "status": "rejected"}
    frame = {"type": "rate_limit_event", "rate_limit_info": {"unifiedWindows": {"five_hour": window}}}
    session = served.open(name="waits", on_limit="wait")
    tab = visits.tab(session)
    asked = [served.ask(session, f"@@raw {json.dumps(frame)}\n@@boundary {json.dumps(LIMITED)}")]
    asked += [served.ask(session, f"later {number}") for number in range(2)]
    expect(tab.page.locator(".limited")).to_have_text(re.compile(r"^limited until \d\d:\d\d, 3 asks wait$"))
    expect(tab.items("ended")).to_have_count(0)
    for turn in asked:
        served.post(f"/v1/sessions/{session}/turns/{turn}/interrupt", {})
    expect(tab.page.locator(".limited")).to_have_text(re.compile(r"^limited until \d\d:\d\d$"))


def test_retry_of_agent_is_a_note_of_its_turn(visits: Visits) -> None:
    session = visits.served.open(name="retries")
    tab = visits.tab(session)
    frame = {**RETRY, "error_status": 529, "error": "overloaded"}
    turn = visits.served.ask(session, f"@@raw {json.dumps(frame)}\n@@hang")
    note = tab.page.locator('[data-item="note"]', has_text="The provider failed")
    expect(note).to_contain_text("The provider failed (overloaded, 529). The agent tries again in 600 s, 3 of 10.")
    visits.served.post(f"/v1/sessions/{session}/turns/{turn}/interrupt", {})
    expect(tab.items("ended")).to_have_count(1)


def test_success_without_answer_says_so(visits: Visits) -> None:
    session = visits.served.open(name="empty")
    tab = visits.tab(session)
    ended = json.dumps({"result": ""})
    visits.served.ask(session, f"@@tool_use Bash {{}}\n@@tool_result ok\n@@boundary {ended}")
    expect(tab.items("ended")).to_contain_text("no answer")
