"""Applies the rules of health to two readings of a node, and says what the findings make of a guess from an error.

A guess is the verdict on a failed worker by the text of its exception alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ft.faults.health.rows import (
    ACTIONS,
    AT_LEAST,
    AT_MOST,
    FELL,
    GPU_RULES,
    GREW,
    HAPPENED,
    MOVED,
    NODE_RULES,
    ROSE,
    THIS,
    WATCH,
    Rule,
)
from ft.faults.verdict import REPLACE, RESTART, RETRY, SEVERITY, Verdict
from ft.platform.health.observation import COUNTER, EVENT, GAUGE, Observation, Reading, differences


@dataclass(frozen=True)
class Finding:
    """Something about a node that its operators should know.

    Attributes:
        device: name of the device, "" for the node as a whole.
        category: class of fault, as in ``ft.faults.verdict``.
        action: "watch", "evict at the next step" or "drain".
        cause: where the cause is, as in ``ft.faults.health.rows``.
        reason: what was observed, with its value.
        advice: what a person should do.
        source: where the meaning of the observation is written down.
        when: wall time of the (last) observation in seconds since 1970.
    """

    node: str
    device: str
    observation: str
    category: str
    action: str
    cause: str
    reason: str
    advice: str
    source: str
    when: float

    @property
    def key(self) -> tuple[str, str]:
        """Return what is equal for findings of the same fault of the same device."""
        return self.device, self.observation

    @property
    def is_evidence(self) -> bool:
        """Return whether the finding speaks against its own device or node, and not only for watching it."""
        return self.action != WATCH


def rules(before: Reading | None, now: Reading, table: Sequence[Rule] = (*GPU_RULES, *NODE_RULES)) -> list[Finding]:
    """Return what two readings of a node reveal, the most severe findings first.

    Args:
        before: the earlier reading. None: growth cannot be judged, and all events of the later one count.
        table: the rules; the first that is about an observation applies to it.
    """
    found = [*_of_events(before, now, table), *_of_counters(before, now, table), *_of_values(before, now, table)]
    return sorted(found, key=lambda each: (-ACTIONS.index(each.action), each.device, each.observation))


def informed(guess: Verdict, findings: Iterable[Finding], device: str) -> Verdict:
    """Return the verdict on a failed worker in the light of what its own node has found.

    A finding with an action against the worker's device, or against the node as a whole, replaces the guess, unless the
    guess is already more severe than replacing the worker. No finding of another device counts, and no finding whose
    cause may be a peer's, so a verdict never becomes worse for what others have done.

    Args:
        guess: the verdict by the text of the exception.
        findings: the findings of the worker's node since shortly before the failure.
        device: name of the worker's device, such as "gpu3"; "" if it has none.
    """
    able = [each for each in findings if each.is_evidence and each.cause == THIS and _concerns(each, device)]
    if not able or SEVERITY.index(guess.action) > SEVERITY.index(RESTART):
        return guess
    worst = max(able, key=lambda each: ACTIONS.index(each.action))
    reason = f"{worst.device or 'the node'}: {worst.reason}; it said: {guess.reason}"
    # A restart of all workers would hit the same device again: what a defect does to a program looks like a bug.
    action = REPLACE if guess.action in (RETRY, REPLACE, RESTART) else guess.action
    is_device = bool(device) and _is_part_of(worst.device, device)
    return replace(
        guess,
        category=worst.category,
        action=action,
        reason=reason,
        signal=worst.observation,
        node_suspect=not is_device,
        device_unusable=is_device,
        key=f"{worst.device} {worst.observation}",
    )


def _concerns(finding: Finding, device: str) -> bool:
    """Return whether a finding is about this device, or about a part of the node that all of its workers use."""
    return _is_part_of(finding.device, device) or not finding.device.startswith("gpu")


def _is_part_of(part: str, device: str) -> bool:
    return part == device or part.startswith(f"{device}/")


def _rule_for(observation: str, table: Sequence[Rule]) -> Rule | None:
    return next((rule for rule in table if rule.is_about(observation)), None)


def _finding(rule: Rule, observed: Observation, reason: str) -> Finding:
    said = f"{rule.meaning}{': ' if reason else ''}{reason}"
    place = (observed.node, observed.device, observed.name)
    return Finding(*place, rule.category, rule.action, rule.cause, said, rule.advice, rule.source, observed.when)


def _of_events(before: Reading | None, now: Reading, table: Sequence[Rule]) -> list[Finding]:
    known = set() if before is None else {(o.device, o.name, o.text) for o in before.observations if o.kind == EVENT}
    new: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for each in now.observations:
        if each.kind == EVENT and (each.device, each.name, each.text) not in known:
            new[each.device, each.name].append(each)
    found = []
    for (_, name), events in new.items():
        rule = _rule_for(name, table)
        if rule is not None and rule.condition == HAPPENED and len(events) >= rule.limit:
            times = f"{len(events)} times, the last: " if len(events) > 1 else ""
            found.append(_finding(rule, events[-1], times + events[-1].text))
    return found


def _of_counters(before: Reading | None, now: Reading, table: Sequence[Rule]) -> list[Finding]:
    found = []
    for change in differences(before, now):
        rule = _rule_for(change.now.name, table)
        if rule is not None and rule.condition == GREW and change.grew >= rule.limit:
            label = f" ({change.now.text})" if change.now.text else ""
            reason = f"{change.grew:g} in {change.seconds:.0f} s, {change.now.value:g} in all{label}"
            found.append(_finding(rule, change.now, reason))
    return found


def _of_values(before: Reading | None, now: Reading, table: Sequence[Rule]) -> list[Finding]:
    was = {} if before is None else {(o.device, o.name): o.value for o in before.observations if o.kind == GAUGE}
    found = []
    for each in now.observations:
        rule = None if each.kind in (EVENT, COUNTER) else _rule_for(each.name, table)
        if rule is not None and (reason := _holds(rule, each, was.get((each.device, each.name)))):
            found.append(_finding(rule, each, reason))
    return found


def _holds(rule: Rule, now: Observation, before: float | None) -> str:
    """Return the value that fulfils a rule's condition, in words, or ""."""
    rose = 0.0 if before is None else now.value - before
    holds = {
        AT_LEAST: now.value >= rule.limit,
        AT_MOST: now.value <= rule.limit,
        ROSE: rose >= rule.limit,
        FELL: -rose >= rule.limit,
        MOVED: abs(rose) >= rule.limit,
    }
    if not holds.get(rule.condition, False):
        return ""
    unit = f" {now.unit}" if now.unit else ""
    value = f"{rose:+.3g}{unit}" if rule.condition == MOVED else f"{now.value:.3g}{unit}"
    earlier = f" (it was {before:.3g}{unit})" if rule.condition in (ROSE, FELL) else ""
    return value + earlier + (f", {now.text}" if now.text else "")
