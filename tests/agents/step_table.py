"""Register the steps of one side by the name that they have in the table and on the other side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

StepT = TypeVar("StepT", bound=Callable[..., object])


def step_of(steps: dict[str, StepT], name: str) -> Callable[[StepT], StepT]:
    """Decorate a step: enter it into the table under this name."""

    def add(function: StepT) -> StepT:
        assert name not in steps
        steps[name] = function
        return function

    return add
