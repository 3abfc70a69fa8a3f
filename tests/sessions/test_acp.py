"""Sessions with an ACP agent: turns and their ends, interrupts, quirks, conversations, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.acp_case import bodies, killed, known, methods, opened, sent, texts
from tests.sessions.helpers import SHORT_DRAIN, Case, exists

from banksman import INTERACTIVE, Kind, Turn, UsageError
from banksman.core.session import event as kinds
from banksman.core.session.outcome import By


# -- turns -----------------------------------------------------------------------------------------------------------
async def test_turn_reports_last_message_stop_reason_and_usage(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer("@@text Looking.\n@@ran ls\n@@text All\n@@text  is well.")
        assert (outcome.kind, outcome.text, outcome.stop_reason) == (Kind.DONE, "All is well.", "end_turn")
        assert outcome.usage == {"inputTokens": 3, "outputTokens": 4, "totalTokens": 7}
        assert (await case.answer("hello")).text == "you said: hello"
        assert methods(case) == ["session/new"]
        assert sent(case)[1]["params"] == {"cwd": str(tmp_path), "mcpServers": []}


async def test_turn_yields_updates_in_agent_order(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask("@@think hm\n@@plan look\n@@ran ls\n@@text done\n@@mode code")
        kinds_ = [update["sessionUpdate"] async for update in turn]
        await case.outcome(turn)
        assert kinds_ == [
            *("agent_thought_chunk", "plan", "tool_call", "tool_call_update", "agent_message_chunk"),
            "current_mode_update",
        ]


@pytest.mark.parametrize(
    ("prompt", "kind", "words"),
    [
        ("@@stop max_tokens", Kind.DONE, None),
        ("@@stop refusal", Kind.FAILED, "refused to continue"),
        ("@@stop max_turn_requests", Kind.FAILED, "its limit of model requests"),
        ("@@stop cancelled", Kind.FAILED, "without a request"),
        ("@@error -32603 the model is gone", Kind.FAILED, "the model is gone (-32603)"),
        ("@@exit 3", Kind.FAILED, "3"),
    ],
)
async def test_turn_outcome_matches_stop_reason(tmp_path: Path, prompt: str, kind: Kind, words: str | None) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer(prompt)
        assert outcome.kind is kind
        assert (outcome.error is None) if words is None else (words in str(outcome.error))
        # The next turn works.
        assert (await case.answer("on")).text == "you said: on"


async def test_turn_includes_text_that_arrives_late(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"quiet_seconds": 0.5}) as case:
        first = await case.answer("@@text early\n@@late  and late")
        assert (first.kind, first.text) == (Kind.DONE, "early and late")
        assert (await case.answer("@@text next")).text == "next"


async def test_session_ignores_unparsable_lines_and_stray_replies(tmp_path: Path) -> None:
    strays = "\n".join(f"@@stray {id}" for id in ("1", "2", "999", '"2"', '"x"', "null"))
    for is_string in (False, True):
        async with opened(
            tmp_path / str(is_string), character={"has_string_ids": is_string, "says_first": "hi!"}
        ) as case:
            prompt = f'@@raw garbage\n@@raw [1, 2]\n@@raw []\n@@raw {{"id": 5}}\n{strays}\n@@text well\n@@twice'
            assert (await case.answer(prompt)).text == "well"
            assert (await case.answer("@@text again\n@@twice")).text == "again"


async def test_turn_ignores_updates_of_another_conversation(tmp_path: Path) -> None:
    """A subagent has a separate conversation, and may speak first."""
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "foreign"}}
    aside = json.dumps({"method": "session/update", "params": {"sessionId": "other", "update": update}})
    async with opened(tmp_path) as case:
        turn = await case.ask(f"@@raw {aside}\n@@text mine\n@@raw {aside}")
        assert (await case.outcome(turn)).text == "mine"
        assert "foreign" not in str([update async for update in turn])
        told = [event for event in await case.events() if b"foreign" in event.data and event.kind == kinds.UPDATE]
        assert [event.turn for event in told] == [None, None], "they are in the log"


@pytest.mark.parametrize("id", ["1.5", "true", "[]", '{"a":1}', "99999999999999999999999999"])
async def test_session_answers_request_with_invalid_id_under_null_id(tmp_path: Path, id: str) -> None:
    async with opened(tmp_path) as case:
        prompt = f'@@raw {{"jsonrpc":"2.0","id":{id},"method":"fs/read_text_file","params":{{}}}}\n@@text well'
        assert (await case.answer(prompt)).text == "well"
        [error] = [frame for frame in sent(case) if "error" in frame]
        assert (error["id"], error["error"]["code"]) == (None, -32600)


async def test_oversized_batch_fails_only_its_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert (await case.answer(f"@@raw {[0] * 10_000}\n@@text well")).text == "well"
        many = json.dumps([{"method": "x"}] * 300)
        assert (await case.answer(f"@@raw {many}")).kind is Kind.FAILED
        assert (await case.answer("@@text next")).text == "next"


async def test_oversized_answer_fails_only_its_turn(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"frame_bytes_max": 100_000}) as case:
        outcome = await case.answer("@@text x\n@@huge 300000")
        assert (outcome.kind, str(outcome.error)) == (Kind.FAILED, "frame_too_large")
        assert (await case.answer("on")).text == "you said: on"
        assert len(case.processes) == 1


async def test_turn_fails_with_reason_when_agent_cannot_take_content(tmp_path: Path) -> None:
    image = {"type": "image", "data": "AA==", "mimeType": "image/png"}
    async with opened(tmp_path, character={"takes": []}) as case:
        outcome = await case.outcome(await case.session.ask([image]))
        assert outcome.kind is Kind.FAILED
        assert "does not accept image" in str(outcome.error)
        assert (await case.answer("on")).kind is Kind.DONE
    async with opened(tmp_path / "other") as case:
        outcome = await case.outcome(await case.session.ask([{"type": "text", "text": "look"}, image]))
        assert outcome.text == "you said: look\n[image]"


# -- interrupts ------------------------------------------------------------------------------------------------------
async def test_interrupt_sends_cancel_and_keeps_session_usable(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.reaches("@@text begun\n@@hang")
        receipt = await turn.interrupt()
        assert (receipt.stopped, receipt.by, receipt.kept) == (True, By.BOUNDARY, "begun")
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert (await case.answer("on")).text == "you said: on"
        assert methods(case) == ["session/new", "session/cancel"]


async def test_urgent_ask_preempts_running_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        slow = await case.reaches("@@hang")
        assert (await case.answer("now", priority=INTERACTIVE)).text == "you said: now"
        assert (await case.outcome(slow)).kind is Kind.PREEMPTED


@pytest.mark.parametrize("after", ["end_turn", "error"])
async def test_cancelled_turn_is_interrupted_when_agent_is_known_to_answer_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    agent = known(monkeypatch, tmp_path, 'cancel_may_say = ["end_turn"]')
    async with opened(tmp_path, agent=agent, character={"after_cancel": after}) as case:
        turn = await case.reaches("@@text x\n@@hang")
        assert (await turn.interrupt()).stopped
        outcome = await case.outcome(turn)
        assert outcome.kind is Kind.INTERRUPTED
        # The reported stop reason is kept.
        assert outcome.stop_reason == ("end_turn" if after == "end_turn" else None)


async def test_cancelled_turn_is_done_when_unknown_agent_reports_end_turn(tmp_path: Path) -> None:
    async with opened(tmp_path, character={"after_cancel": "end_turn"}) as case:
        turn = await case.reaches("@@text x\n@@hang")
        assert not (await turn.interrupt()).stopped
        assert (await case.outcome(turn)).kind is Kind.DONE


@pytest.mark.parametrize("prompt", ["@@hang", "@@text that was all\n@@never"])
async def test_unanswered_cancel_is_ended_by_ladder_and_conversation_is_resumed(tmp_path: Path, prompt: str) -> None:
    async with opened(tmp_path, options=SHORT_DRAIN, character={"after_cancel": "nothing"}) as case:
        assert (await case.answer("remember me")).kind is Kind.DONE
        turn = await case.reaches(prompt)
        receipt = await turn.interrupt()
        assert (receipt.stopped, receipt.by) == (True, By.LADDER)
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert (await case.answer("on")).text == "you said: on"
        assert len(case.processes) == 2
        assert "session/load" in methods(case)
        events = await case.events()
        assert "remember me" in texts(events, kinds.RECITED)
        assert kinds.SESSION_CONTEXT_LOST not in [event.kind for event in events]


def alive(pids: Path) -> list[int]:
    def is_alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except FileNotFoundError:
            return False

    return [pid for pid in map(int, pids.read_text().split()) if is_alive(pid)]


async def in_tool(case: Case) -> tuple[Turn, Path]:
    pids = case.path(f"pids-{len(list(case.folder.glob('pids-*.ready')))}")
    turn = await case.ask(f"@@tool {pids}")
    await exists(Path(f"{pids}.ready"))
    await case.wait_said("a tree")
    assert len(alive(pids)) == 4
    return turn, pids


async def test_interrupt_sweeps_tool_that_cancel_left_running(tmp_path: Path) -> None:
    async with opened(tmp_path, character={"leaves_tools": True}) as case:
        turn, pids = await in_tool(case)
        assert (await turn.interrupt()).by is By.BOUNDARY
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        # The next prompt is sent only after the tool is gone.
        assert (await case.answer("on")).text == "you said: on"
        assert alive(pids) == []
        assert len(case.processes) == 1
        [swept] = bodies(await case.events(), kinds.PROCESS_SWEPT)
        assert swept["by"] == "interrupt"


@pytest.mark.thorough
async def test_interrupt_keeps_running_tool_until_close_when_configured(tmp_path: Path) -> None:
    character, options = {"leaves_tools": True}, {"after_interrupt": "keep"}
    async with opened(tmp_path, character=character, options=options) as case:
        turn, pids = await in_tool(case)
        await turn.interrupt()
        await case.outcome(turn)
        assert (await case.answer("on")).kind is Kind.DONE
        assert len(alive(pids)) == 4
    # The tool ends with the session.
    assert alive(pids) == []


async def test_interrupt_sweeps_nothing_when_agent_ends_its_tool(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn, pids = await in_tool(case)
        await turn.interrupt()
        await case.outcome(turn)
        assert (await case.answer("on")).kind is Kind.DONE
        assert alive(pids) == []


# -- quirks ----------------------------------------------------------------------------------------------------------
async def test_turn_fails_on_error_text_when_agent_is_known_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = known(monkeypatch, tmp_path, "error_texts = ['^Error: [45]']")
    async with opened(tmp_path, agent=agent) as case:
        outcome = await case.answer("@@text Error: 400 no such model")
        assert (outcome.kind, outcome.stop_reason) == (Kind.FAILED, "end_turn")
        assert str(outcome.error) == "Error: 400 no such model"
        assert (await case.answer("@@text Errors: none")).kind is Kind.DONE
    async with opened(tmp_path / "other") as case:
        assert (await case.answer("@@text Error: 400 no such model")).kind is Kind.DONE


async def test_turn_fails_on_silence_when_agent_is_known_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = known(monkeypatch, tmp_path, "silence_is_error = true")
    async with opened(tmp_path, agent=agent) as case:
        outcome = await case.answer("@@silence")
        assert (outcome.kind, outcome.stop_reason) == (Kind.FAILED, "end_turn")
        assert "gave no output" in str(outcome.error)
        assert (await case.answer("@@ran ls")).kind is Kind.DONE
        turn = await case.reaches("@@hang")
        await turn.interrupt()
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED


# -- the conversation ------------------------------------------------------------------------------------------------
CHARACTERS: dict[str, dict[str, Any]] = {
    "load": {"loads": True},
    "load, late": {"loads": True, "replays_late": True},
    "resume": {"resumes": True},
}


@pytest.mark.parametrize("how", CHARACTERS)
async def test_conversation_is_resumed_after_agent_is_killed(tmp_path: Path, how: str) -> None:
    async with opened(tmp_path, character=CHARACTERS[how]) as case:
        for number in range(3):
            await case.answer(f"@@text word {number}")
        await killed(case)
        outcome = await case.answer("@@text after")
        # Earlier messages are not repeated.
        assert outcome.text == "after"
        assert methods(case) == (
            ["session/new", "session/resume"] if how == "resume" else ["session/new", "session/load", "_banksman/fence"]
        )
        events = await case.events()
        recited = texts(events, kinds.RECITED)
        assert ("word 2" in recited) is (how != "resume")
        assert texts(events).count("word 2") == 1
        [turn] = {event.turn for event in events if event.kind == kinds.UPDATE and b"after" in event.data}
        assert texts([event for event in events if event.turn == turn]).count("word") == 0
        assert bodies(events, kinds.SESSION_CONTEXT_LOST) == []


@pytest.mark.parametrize("code", [-32602, -32002, -32603])
async def test_session_reports_lost_conversation_and_begins_another(tmp_path: Path, code: int) -> None:
    async with opened(tmp_path, character={"unknown_code": code}) as case:
        await case.answer("hello")
        for file in (tmp_path / "memory").iterdir():
            file.unlink()
        await killed(case)
        assert (await case.answer("again")).text == "you said: again"
        [lost] = bodies(await case.events(), kinds.SESSION_CONTEXT_LOST)
        assert lost["conversation"] in sent(case)[2]["params"]["sessionId"]


async def test_session_loses_conversation_when_agent_cannot_load(tmp_path: Path) -> None:
    async with opened(tmp_path, character={"loads": False}) as case:
        await case.answer("hello")
        await killed(case)
        assert (await case.answer("again")).kind is Kind.DONE
        assert len(bodies(await case.events(), kinds.SESSION_CONTEXT_LOST)) == 1


async def test_session_resumes_conversation_of_another_session(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        await case.answer("hello")
        conversation = case.state().conversation
    async with opened(tmp_path / "other", resume="of nobody") as case:
        outcome = await case.answer("hello")
        assert outcome.kind is Kind.FAILED
        assert "of nobody" in str(outcome.error)
    (tmp_path / "third").mkdir()
    (tmp_path / "memory").rename(tmp_path / "third" / "memory")
    async with opened(tmp_path / "third", resume=conversation) as case:
        assert (await case.answer("on")).text == "you said: on"
        assert "session/load" in methods(case)
        assert "you said: hello" in texts(await case.events(), kinds.RECITED)


@pytest.mark.parametrize(
    ("character", "words"),
    [
        ({"wants_login": True}, ["requires a login", "Use a key: Set FAKE_KEY"]),
        ({"version": 2}, ["speaks ACP version 2"]),
    ],
)
async def test_failed_handshake_names_who_must_act(tmp_path: Path, character: dict[str, Any], words: list[str]) -> None:
    async with opened(tmp_path, character=character) as case:
        outcome = await case.answer("hello")
        assert outcome.kind is Kind.FAILED
        for word in words:
            assert word in str(outcome.error)
        assert "authenticate" not in methods(case)


# -- settings --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("offers", ["modes", "options"])
async def test_session_sets_requested_model_and_mode(tmp_path: Path, offers: str) -> None:
    async with opened(tmp_path, character={"offers": offers}, model="big", permission_mode="code") as case:
        assert (await case.answer("@@status")).text == "code big"
        await case.session.set_model("small")
        await case.session.set_permission_mode("ask")
        assert (await case.answer("@@status")).text == "ask small"
        # The next process gets the settings too.
        await killed(case)
        await case.session.set_model("big")
        assert (await case.answer("@@status")).text == "ask big"


async def test_session_lists_offered_models_when_model_is_unknown(tmp_path: Path) -> None:
    async with opened(tmp_path, model="huge") as case:
        outcome = await case.answer("hello")
        assert outcome.kind is Kind.FAILED
        assert "no model 'huge'" in str(outcome.error)
        assert "small, big" in str(outcome.error)
    async with opened(tmp_path / "other") as case:
        await case.answer("hello")
        with pytest.raises(Exception, match="choose among ask, code"):
            await case.session.set_permission_mode("yolo")
        assert (await case.answer("on")).kind is Kind.DONE


async def test_session_passes_mcp_servers_to_agent(tmp_path: Path) -> None:
    server = {"name": "files", "command": "/bin/true", "args": ["x"], "env": [{"name": "A", "value": "b"}]}
    async with opened(tmp_path, mcp_servers=[server]) as case:
        await case.answer("hello")
        assert sent(case)[1]["params"]["mcpServers"] == [server]


# -- refusals before sending -----------------------------------------------------------------------------------------
async def test_ask_refuses_content_that_known_agent_does_not_take(tmp_path: Path) -> None:
    audio = [{"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}]
    async with opened(tmp_path / "known", agent="codex-acp") as case:
        with pytest.raises(UsageError, match="audio"):
            await case.session.ask(audio)
    async with opened(tmp_path / "custom") as case:
        await case.outcome(await case.session.ask(audio))
        assert sent(case)[-1]["params"]["prompt"] == audio


@pytest.mark.parametrize("name", ["model", "permission_mode"])
async def test_session_refuses_setting_that_is_not_encodable(tmp_path: Path, name: str) -> None:
    async with opened(tmp_path) as case:
        with pytest.raises(UsageError, match=f"cannot send {name} as UTF-8"):
            await (case.session.set_model if name == "model" else case.session.set_permission_mode)("\ud800")
