"""Conversations about functions without state: expressions of Python, and their values or what is refused."""

from typing import Any

from conversations import Player

from ft.base.errors import FtError
from megatron import patches


class Values(Player):
    """Shows the value of each expression, as Python writes it; ``from MODULE import NAME`` brings what it needs.

    ``RUN`` is the folder, in which ``file`` makes files. ``each EXPRESSION | A | B``: the values of the expression with
    ``it`` set to A, then to B, each beside it.
    """

    def __init__(self, folder):
        super().__init__(folder)
        patches.apply()  # before megatron-core is imported
        self.names: dict[str, Any] = {"RUN": folder}

    def _carry_out(self, command: str) -> list[str]:
        if command.startswith("file "):
            return super()._carry_out(command) or []
        if command.startswith("from "):
            exec(command, self.names)
            return []
        if not command.startswith("each "):
            return [self._value(command)]
        expression, *given = command.removeprefix("each ").split(" | ")
        return [f"{it}: {self._value(expression, it)}" for it in given]

    def _value(self, expression: str, it: str = "None") -> str:
        try:
            found = eval(expression, {**self.names, "it": eval(it, self.names)})
        except (FtError, ValueError, OSError) as error:
            return f"{type(error).__name__}: {' / '.join(str(error).splitlines())}"
        return repr(sorted(found) if isinstance(found, set | frozenset) else found)


PLAYERS = {"values": Values}
