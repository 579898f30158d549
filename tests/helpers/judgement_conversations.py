"""Conversations about judgements: the first cause of a crash, the health of a node, and planned faults."""

from dataclasses import asdict

from conversations import Player
from planted_crashes import TEXTS

from ft.base.errors import UserError
from ft.faults import Fault, parse, read_scenario, schedule, verdict
from ft.faults.first_cause import CrashError, Frame, Group, Raised, class_of_exception, first_cause
from ft.faults.health import informed, rules
from ft.platform.health import EVENT, Observation, Reading
from ft.platform.health.kernel_log import parse as parse_line
from ft.record import crash


class Errors(Player):
    """Errors of a run, and which of them came first."""

    def do_errors(self):
        """A run of which nothing is known."""
        self.errors = []
        return []

    def do_error(self, rank, *chain, when=0.0, name="work", trace="a stack", worker="", **values):
        """A worker has raised ``KIND: message``, after the exceptions before it in the chain; without one: it was seen
        otherwise (``signal``, ``by_us``, ``observed`` and ``told``). ``name``: the function that has raised it."""
        frames = (Frame("train.py", 8, name),) if trace else ()
        pairs = [text.partition(": ") for text in chain]
        raised = tuple(Raised((kind,), message, frames) for kind, _, message in pairs)
        place = (worker or f"n0.w{rank}", "n0", rank)
        self.errors.append(CrashError(*place, raised, trace if chain else "", when=when, **values))
        return []

    def do_cause(self, **how):
        found = first_cause(self.errors, **how)
        if found is None:
            return ["no cause"]
        lines = [f"cause: {self._told(found.cause)}, attempt {found.cause.first.attempt}"]
        lines += [f"other: {self._told(group)}" for group in found.others]
        lines += [f"consequence: {self._told(group)}" for group in found.consequences]
        more = {"earlier attempts": found.earlier, "may have been waited for": list(found.quiet)}
        return [*lines, *(f"{name}: {value}" for name, value in more.items() if value)]

    def _told(self, group: Group) -> str:
        return f"{group.kind}, ranks {group.ranks}; {group.first.worker}: {group.first.head}"

    def do_class(self, kind, message=""):
        """Show the class of an exception."""
        return [f"{class_of_exception(Raised((kind,), message))}: {kind}: {message}"]

    def do_log(self, *parts, prefix=""):
        """Show what is read of a log of texts of ``planted_crashes`` or other lines, each with a prefix."""
        text = "".join(TEXTS.get(part, f"{part}\n") for part in parts)
        found = crash.parse("".join(prefix + line for line in text.splitlines(keepends=True)))
        if found is None:
            return ["no crash"]
        said = [f"{one.kinds[0]}: {one.message!r} in {[frame.name for frame in one.frames]}" for one in found.chain]
        return [*said, *found.text.splitlines(), *([] if found.is_last else ["something else follows"])]


GUESSES = {
    "lost": verdict.of_error(["RuntimeError"], "NCCL error: ncclRemoteError"),
    "bug": verdict.of_error(["AcceleratorError"], "CUDA error: device-side assert triggered"),
    "stop": verdict.of_exit(verdict.USER_CODE),
}


_ALIASES = {"0000:3b:00.0": "gpu1", "0000:08:00.0": "mlx5_0"}
"""PCI address -> name of the device there."""


class Health(Player):
    """What a node observes, and what follows from that."""

    def do(self, command):
        """Show the observation that a line of the kernel log is, for ``line TEXT``, beside the usual commands."""
        if not command.startswith("line "):
            return super().do(command)
        found = parse_line(f"[ 1234.500000] {command.removeprefix('line ')}", "n0", 5e9, 1e9, _ALIASES)
        return ["no event" if found is None else f"{found.name} | {found.device or '-'} | {found.value:g}"]

    def do_before(self, *observed, when=100.0):
        """An earlier reading: lists of device, name, value, kind and perhaps the text of each observation."""
        self.earlier = self._reading(observed, when)
        return []

    def do_alone(self):
        """There is no earlier reading."""
        self.earlier = None
        return []

    def do_now(self, *observed, when=100.0):
        """Show what is found in a reading, the most severe first."""
        self.found = rules(self.earlier, self._reading(observed, when))
        return [self._told(each) for each in self.found]

    def do_xid(self, *numbers, device="gpu0"):
        """Show what is found if the driver reports these Xids, each alone."""
        self.earlier = Reading("n0", 100.0, ())
        pairs = [
            (device, f"xid.{number}", float(str(number).partition(".")[0]), EVENT, "NVRM: Xid") for number in numbers
        ]
        return [line for each in pairs for line in self.do_now(each)]

    def do_informed(self, guess, device=""):
        """Show what the findings make of a guess from an error of a worker on this device."""
        before = GUESSES[guess]
        found = informed(before, self.found, device)
        if found == before:
            return ["the verdict stays"]
        marks = [name for name in ("device_unusable", "node_suspect") if getattr(found, name)]
        return [f"{found.category}, {found.action}, {found.signal}, {', '.join(marks)}: {found.reason}"]

    def _reading(self, observed, when: float) -> Reading:
        made = (Observation("n0", d, name, value, "", when, kind, *text) for d, name, value, kind, *text in observed)
        return Reading("n0", when, tuple(made))

    def _told(self, found) -> str:
        evidence = "evidence" if found.is_evidence else "no evidence"
        place = f"{found.device} {found.observation}".strip()
        return f"{place}: {found.category}, {found.action}, {evidence}: {found.reason} ({found.source})"


class Faults(Player):
    """What is asked for with --inject and --scenario, on eight ranks and three nodes."""

    def do(self, command):
        """Show the faults that ``plan SPEC`` and ``scenario FILE`` lead to, beside the usual commands."""
        name, _, text = command.partition(" ")
        try:
            if name == "plan":
                return self._told(schedule(parse(text), 8, ["n0", "n1", "n2"], 0))
            if name == "scenario":
                found = read_scenario(self.folder / text)
                return [
                    f"seed {found.seed}",
                    *self._told(schedule(found.specs, 8, ["n0", "n1", "n2"], found.seed or 0)),
                ]
        except UserError as error:
            return str(error).replace(str(self.folder), "RUN").splitlines()
        return super().do(command)

    def _told(self, faults: list[Fault]) -> list[str]:
        usual = asdict(Fault(0, ""))
        given = [{key: value for key, value in asdict(fault).items() if value != usual[key]} for fault in faults]
        said = [" ".join(f"{key}={value}" for key, value in each.items()) for each in given]
        return [f"{fault}: {values}" for fault, values in zip(faults, said, strict=True)]


PLAYERS = {"cause": Errors, "health": Health, "faults": Faults}
