"""Checks of the doctor that depend on the kind of machine."""

from __future__ import annotations

import pytest

from banksman.cli.doctor import FindingVerdict, machine
from banksman.process import cgroups


@pytest.mark.parametrize("is_undelegated", [True, False])
def test_doctor_tells_root_whether_its_group_is_delegated(
    monkeypatch: pytest.MonkeyPatch, is_undelegated: bool
) -> None:
    """The kernel lets root make groups in every unit, and systemd may undo that."""

    def why_not(*_: object) -> None:
        return None

    def undelegated(_: str) -> bool:
        return is_undelegated

    monkeypatch.setattr(cgroups, "why_not", why_not)
    monkeypatch.setattr(cgroups, "base_folder", lambda: "/cg/session-1.scope")
    monkeypatch.setattr(cgroups, "is_undelegated", undelegated)
    (found,) = machine.control_groups()
    assert found.verdict is (FindingVerdict.NOTE if is_undelegated else FindingVerdict.OK)
    assert ("belongs to systemd" in found.seen) is is_undelegated
    assert ("Delegate=" in found.fix) is is_undelegated
