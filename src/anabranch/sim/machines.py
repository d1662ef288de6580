"""The migration machines of a model's states, by number.

States are hashed and compared often and machines are not, so a state names its machine by a number; equal machines have
the same one.
"""

from __future__ import annotations

import copy
from typing import Any

from anabranch.errors import EngineError
from anabranch.protocol.migration import Migration
from anabranch.protocol.orders import Event


class Machines:
    """A machine that has a number is never changed: what it is told makes another one."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._machines: list[Migration] = []

    def __getitem__(self, number: int) -> Migration:
        return self._machines[number]

    def number(self, machine: Migration) -> int:
        state = ((k, tuple(v.items()) if isinstance(v, dict) else v) for k, v in vars(machine).items())
        number = self._numbers.setdefault(tuple(sorted(state)), len(self._machines))
        if number == len(self._machines):
            self._machines.append(machine)
        return number

    def told(self, number: int, event: Event) -> tuple[int, list[Any], str | None]:
        """What becomes of a machine that hears of an event: its number, its commands, and what is wrong with it."""
        machine = copy.copy(self._machines[number])
        commands: list[Any] = []
        wrong = None
        try:
            commands = machine.handle(event)
            machine.validate()
        except (AssertionError, EngineError) as broken:
            wrong = f"{broken} after {event}"
        return self.number(machine), commands, wrong
