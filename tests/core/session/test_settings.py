"""Change of the model or the permission mode: sent to the process, answered, or applied by another process."""

from __future__ import annotations

from msgspec.structs import replace
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, of, sent

from banksman.core.dialects.meaning import Replied
from banksman.core.process_facts import (
    Started,
)
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.effects import Effect, SettingTaken, StartProcess, StopProcess
from banksman.core.session.facts import (
    AppendFailed,
    CloseAsked,
    DrainAsked,
    ProcessReported,
    Reconfigured,
    SettingAsked,
    Timer,
)
from banksman.core.session.outcome import Kind
from banksman.core.session.settings import CHANGES_MAX
from banksman.core.session.turn import TurnPhase
from banksman.errors import AgentError, Closed, QueueFull, StoreError

A, B = ask("a", NORMAL), ask("b", NORMAL)
LARGE = (("model", "large"),)


def ready() -> Talk:
    """A process that has served a turn and is idle."""
    talk = Talk(TELLING)
    talk.serve(A)
    return talk


def change(talk: Talk, value: str = "large", *, name: str = "model", id: str = "c") -> list[Effect]:
    return talk.tell(SettingAsked(talk.at, id, name, value))


def taken(effects: list[Effect]) -> list[tuple[str, type | None]]:
    return [(e.change, None if e.error is None else type(e.error)) for e in of(SettingTaken, effects)]


def test_setting_is_sent_to_running_process_and_answered() -> None:
    talk = ready()
    effects = change(talk)
    assert sent(effects) == [b"S setting-1-1 model=large\n"]
    assert taken(effects) == []
    assert talk.waits_for(Timer.SETTING) == ["setting-1-1"]
    assert taken(talk.mean(Replied("setting-1-1"))) == [("c", None)]
    assert not talk.waits_for(Timer.SETTING)
    assert talk.state.settings == LARGE
    assert talk.logged(kinds.SESSION_SETTING) == [{"name": "model", "value": "large", "by": "reply"}]
    # A second answer, or a late timer, has no effect.
    assert taken(talk.mean(Replied("setting-1-1", error="no"))) == []
    assert talk.fire((Timer.SETTING, "setting-1-1")) == []
    # The next process starts with the setting. The process that has it already is not replaced.
    talk.serve(B)
    assert len(talk.starts) == 1
    talk.die(code=1)
    talk.ask(ask("c", NORMAL))
    assert talk.starts[-1] == StartProcess(2, "talk", settings=LARGE)


def test_setting_refused_by_agent_is_dropped() -> None:
    talk = ready()
    change(talk)
    [refused] = of(SettingTaken, talk.mean(Replied("setting-1-1", error="no such model")))
    assert isinstance(refused.error, AgentError)
    assert "no such model" in str(refused.error)
    assert talk.state.settings == ()
    assert not talk.waits_for(Timer.SETTING)
    assert not talk.logged(kinds.SESSION_SETTING)


def test_unanswered_setting_replaces_process() -> None:
    talk = ready()
    change(talk)
    assert taken(talk.wait(9.9)) == []
    effects = talk.wait(0.1)
    assert taken(effects) == [("c", None)]
    assert [body["by"] for body in talk.logged(kinds.SESSION_SETTING)] == ["respawn"]
    # The process is idle, and does not fit the next turn.
    assert of(StopProcess, effects) == [StopProcess(1)]
    talk.die(signal=15)
    effects = talk.ask(B)
    assert of(StartProcess, effects) == [StartProcess(2, "talk", settings=LARGE)]
    talk.begin()
    talk.over("b0000")
    assert talk.kinds["b"] is Kind.DONE
    # A late answer of the old process does not affect the new one.
    before = talk.state.settings
    talk.mean(Replied("setting-1-1", error="no"))
    assert talk.state.settings == before


def test_unanswered_setting_replaces_process_after_its_turn() -> None:
    talk = Talk(TELLING)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    assert sent(change(talk)) == [b"S setting-1-1 model=large\n"]
    assert not of(StopProcess, talk.wait(10.0))
    talk.ask(B)
    effects = talk.hear(b"over a0000 a0000", b"settled a0000")
    assert talk.kinds == {"a": Kind.DONE}
    assert of(StopProcess, effects) == [StopProcess(1)]
    assert sent(effects) == []
    assert [body["reason"] for body in talk.logged(kinds.PROCESS_RETIRED)] == ["stale"]
    assert of(StartProcess, talk.die(signal=15)) == [StartProcess(2, "talk", settings=LARGE)]


def test_setting_blocks_prompts_until_answered() -> None:
    talk = ready()
    change(talk)
    assert sent(talk.ask(B)) == []
    assert sent(talk.mean(Replied("setting-1-1"))) == [b"P b0000\n"]


def test_setting_blocks_granted_prompt_until_answered() -> None:
    """The setting comes between the grant and the first byte: the append of the turn's start is pending."""
    talk = ready()
    talk.is_log_slow = True
    talk.ask(B)
    assert talk.state.turn is not None
    assert talk.state.turn.phase is TurnPhase.STARTING
    change(talk)
    assert sent(talk.commit()) == []
    assert sent(talk.mean(Replied("setting-1-1"))) == [b"P b0000\n"]


def test_granted_prompt_moves_to_next_process_when_setting_is_unanswered() -> None:
    talk = ready()
    talk.is_log_slow = True
    talk.ask(B)
    change(talk)
    talk.commit()
    effects = talk.wait(10.0)
    assert sent(effects) == []
    assert of(StopProcess, effects) == [StopProcess(1)]
    talk.is_log_slow = False
    assert of(StartProcess, talk.die(signal=15)) == [StartProcess(2, "talk", settings=LARGE)]
    talk.begin()
    # Each attempt has its own prompt ref.
    talk.over("b0002")
    assert talk.kinds["b"] is Kind.DONE


def test_setting_applies_to_next_process_when_process_dies() -> None:
    talk = ready()
    change(talk)
    effects = talk.die(code=1)
    assert taken(effects) == [("c", None)]
    assert not talk.waits_for(Timer.SETTING)
    assert of(StartProcess, talk.ask(B)) == [StartProcess(2, "talk", settings=LARGE)]


def test_setting_applies_at_once_without_process() -> None:
    talk = Talk(TELLING)
    assert taken(change(talk)) == [("c", None)]
    assert [body["by"] for body in talk.logged(kinds.SESSION_SETTING)] == ["start"]
    assert of(StartProcess, talk.ask(A)) == [StartProcess(1, None, settings=LARGE)]


def test_setting_is_sent_to_starting_process_before_first_prompt() -> None:
    talk = Talk(TELLING)
    talk.ask(A)
    assert talk.starts == [StartProcess(1, None)]
    assert sent(change(talk)) == []
    talk.tell(ProcessReported(0.0, 1, Started(77, 0.0)))
    assert sent(change(talk, "plan", name="permission_mode", id="d")) == []
    # No timer runs before the setting was sent.
    assert not talk.waits_for(Timer.SETTING)
    # The process may have started with the first setting already. It is sent anyway.
    assert taken(talk.effects) == [("c", None)]
    effects = talk.hear(b"ok handshake-1")
    assert sent(effects) == [b"S setting-1-1 model=large\n", b"S setting-1-2 permission_mode=plan\n"]
    assert talk.waits_for(Timer.SETTING) == ["setting-1-1", "setting-1-2"]
    assert sent(talk.mean(Replied("setting-1-1"))) == []
    assert sent(talk.mean(Replied("setting-1-2"))) == [b"P a0000\n"]
    assert taken(talk.effects) == [("c", None), ("d", None)]
    talk.over("a0000")
    assert talk.kinds == {"a": Kind.DONE}
    assert len(talk.starts) == 1


def test_setting_applies_to_next_process_when_start_fails() -> None:
    talk = Talk(TELLING)
    talk.ask(A)
    talk.tell(ProcessReported(0.0, 1, Started(77, 0.0)))
    change(talk)
    assert taken(talk.die(code=1)) == [("c", None)]
    talk.wait(100.0)
    assert of(StartProcess, talk.ask(B)) == [StartProcess(2, None, settings=LARGE)]


def test_setting_is_not_sent_to_stopping_process() -> None:
    talk = ready()
    change(talk)
    talk.wait(10.0)
    effects = change(talk, "small", id="d")
    assert sent(effects) == []
    assert taken(effects) == [("d", None)]
    talk.die(signal=15)
    assert of(StartProcess, talk.ask(B)) == [StartProcess(2, "talk", settings=(("model", "small"),))]


def test_setting_keeps_last_value_of_each_name() -> None:
    talk = Talk(TELLING)
    change(talk, "large", id="1")
    change(talk, "plan", name="permission_mode", id="2")
    change(talk, "small", id="3")
    assert dict(talk.state.settings) == {"model": "small", "permission_mode": "plan"}
    assert len(talk.state.settings) == 2


def test_unanswered_settings_are_bounded() -> None:
    talk = ready()
    for number in range(CHANGES_MAX):
        assert taken(change(talk, id=f"c{number}")) == []
    assert taken(change(talk, id="more")) == [("more", QueueFull)]
    talk.mean(Replied("setting-1-1"))
    assert taken(change(talk, id="again")) == []
    # The process dies: each setting is answered once.
    ids = [id for id, error in taken(talk.die(code=1)) if error is None]
    assert ids == [*(f"c{number}" for number in range(1, CHANGES_MAX)), "again"]


def test_process_with_unanswered_setting_is_not_idle() -> None:
    talk = Talk(replace(TELLING, idle_seconds=1.0))
    talk.serve(A)
    change(talk)
    assert talk.state.idle_since is None
    assert not of(StopProcess, talk.wait(5.0))


def test_setting_is_refused_while_session_closes() -> None:
    for fact in (CloseAsked(0.0), DrainAsked(0.0)):
        talk = Talk(TELLING)
        talk.ask(A)
        talk.begin()
        talk.opens("a0000")
        talk.tell(fact)
        assert taken(change(talk)) == [("c", Closed)]


def test_pending_setting_fails_when_session_closes() -> None:
    talk = ready()
    change(talk)
    talk.tell(CloseAsked(0.0))
    assert taken(talk.die(signal=15)) == [("c", Closed)]
    assert talk.state.settings == ()


def test_pending_setting_ends_when_session_is_reopened() -> None:
    talk = ready()
    change(talk)
    change(talk, "plan", name="permission_mode", id="d")
    effects = talk.tell(Reconfigured(0.0, TELLING, True, ("model",)))
    assert taken(effects) == [("c", None)]
    # An answer to the dropped setting has no effect. The other setting still applies.
    talk.mean(Replied("setting-1-1"))
    assert talk.fire((Timer.SETTING, "setting-1-1")) == []
    assert taken(talk.mean(Replied("setting-1-2"))) == [("d", None)]
    assert talk.state.settings == (("permission_mode", "plan"),)
    # An opening without dropped settings has no effect here.
    assert taken(talk.tell(Reconfigured(0.0, TELLING, False))) == []


def test_reopened_session_drops_settings_that_open_names() -> None:
    talk = Talk(TELLING)
    change(talk)
    change(talk, "plan", name="permission_mode", id="d")
    talk.tell(Reconfigured(0.0, TELLING, True, ("model", "never changed")))
    assert talk.state.settings == (("permission_mode", "plan"),)
    assert talk.logged(kinds.SESSION_SETTING)[2:] == [{"name": "model", "value": None, "by": "opening", "agent": None}]
    assert of(StartProcess, talk.ask(A)) == [StartProcess(1, None, settings=(("permission_mode", "plan"),))]


def test_setting_fails_when_log_cannot_be_written() -> None:
    talk = ready()
    talk.tell(AppendFailed(0.0, StoreError("full")))
    assert taken(change(talk)) == [("c", StoreError)]
    assert talk.state.settings == ()
