"""The end of a process, as the log records it."""

from __future__ import annotations

from tests.core.session.scenarios import ask
from tests.core.session.talk import Talk

from banksman.core.process_facts import (
    Exited,
    ProcessGone,
    Rung,
)
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.facts import (
    ProcessReported,
)

TOOK = (Rung("eof", 100.5), Rung("term", 101.5), Rung("kill", 106.5))


def test_process_end_logs_ladder_rungs_when_there_were_any() -> None:
    for ladder, told in ((TOOK, [{"rung": each.rung, "at": each.at} for each in TOOK]), ((), None)):
        talk = Talk()
        talk.serve(ask("a", NORMAL))
        talk.tell(ProcessReported(talk.at, 1, Exited(None, 9, talk.at)))
        talk.tell(ProcessReported(talk.at, 1, ProcessGone(ladder=ladder)))
        assert talk.logged(kinds.PROCESS_STOPPED) == ([] if told is None else [{"process": 1, "ladder": told}])


def test_process_end_of_another_number_logs_nothing() -> None:
    talk = Talk()
    talk.serve(ask("a", NORMAL))
    talk.tell(ProcessReported(talk.at, 7, ProcessGone(ladder=TOOK)))
    assert not talk.logged(kinds.PROCESS_STOPPED)
