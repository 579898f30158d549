"""A rule of health: which observation, under which condition, is which class of fault, and what is to be done."""

from dataclasses import dataclass

WATCH, EVICT, DRAIN = "watch", "evict at the next step", "drain"
ACTIONS = (WATCH, EVICT, DRAIN)
"""What is to be done, from the mildest to the most severe.

- watch: nothing but to tell people.
- evict at the next step: the device still works, but its worker is to move elsewhere at the end of a step.
- drain: the device or node cannot be relied on any more; nothing new is to be started there.
"""

HAPPENED, GREW = "happened", "grew by"
AT_LEAST, AT_MOST = "is at least", "is at most"
ROSE, FELL, MOVED = "rose by", "fell by", "moved by"
"""Conditions: ``HAPPENED`` is for events, ``GREW`` for counters and the others for present values. ``GREW`` and the
last three compare with the reading before. The limit of ``HAPPENED`` is a number of events in one reading."""

THIS, LINK, PROGRAM, ELSEWHERE = "this device", "a link with two ends", "a program", "an earlier fault"
"""Where the cause is: in the device or node that reports it, in a link whose other end may be at fault, in what a
program does, or in a fault that was reported before or by another device."""


@dataclass(frozen=True)
class Rule:
    """A rule of health.

    Attributes:
        observation: name of the observation; with "*" at its end, all names that begin so.
        condition: one of the conditions of this module.
        limit: the number that the condition compares with.
        category: class of fault, as in ``ft.faults.verdict``.
        action: WATCH, EVICT or DRAIN.
        cause: where the cause is. Only a fault of this device is a reason to act against it.
        meaning: what was observed, as the beginning of a sentence.
        advice: what a person should do, as a sentence.
        source: where the meaning of the observation is written down.
    """

    observation: str
    condition: str
    limit: float
    category: str
    action: str
    cause: str
    meaning: str
    advice: str
    source: str

    def __post_init__(self) -> None:
        """Check that no device suffers for what another one, or a program, may have done.

        Raises:
            ValueError: the rule acts against a device although the cause may lie elsewhere.
        """
        if self.action != WATCH and self.cause != THIS:
            raise ValueError(f"{self.observation}: {self.action}, although the cause is {self.cause}")

    def is_about(self, observation: str) -> bool:
        """Return whether the rule is about observations of this name."""
        if self.observation.endswith("*"):
            return observation.startswith(self.observation[:-1])
        return observation == self.observation
