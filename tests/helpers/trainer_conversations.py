"""Conversations about flags of the trainer, checkouts of Megatron-LM, and plans that are made of a profile."""

import json
from unittest import mock

import torch
from conversations import Player
from dmr_traces import pipeline_trace
from planted_checkout import FILES, plant

from ft.adapters.megatron_lm import hooks, tree
from ft.adapters.megatron_lm.start import resuming
from ft.adapters.megatron_lm.step import loss_name
from ft.base.checkout import CHECKOUT
from ft.commands import checkouts
from ft.job.agent.options import Script
from ft.systems.dmr.plan.file import write_trace
from ft.systems.schedule.kinds import Pipeline
from megatron.ft_trainer import arguments
from megatron.ft_trainer.arguments import needs


class Trainer(Player):
    """Flags of the trainer, and what is refused before anything starts."""

    def line_base(self, text):
        """From now on these flags stand before all others, each of which replaces an earlier one of its name."""
        self.base = text

    def line_parse(self, text):
        """Show what these flags alone are taken for."""
        return [str(arguments.parse(text).given())]

    def line_check(self, text):
        """Show the layout of a world of so many ranks, ``N[/R][,te][,gpu]``, and what follows from other flags.

        ``R``: number of replicas; ``te``, ``gpu``: Transformer Engine is installed, there are GPUs.
        """
        world, _, flags = text.partition(" ")
        numbers, *has = world.split(",")
        size, _, replicas = numbers.partition("/")
        options = arguments.parse(f"{self.base} {flags}")
        has_what = {"has_te": "te" in has, "has_gpu": "gpu" in has}
        grid = arguments.check(options, int(size), **has_what, replicas=int(replicas or 0))
        core, names = options.core, ("ffn_hidden_size", "kv_channels", "max_position_embeddings", "sequence_parallel")
        layout = " ".join(f"{name}={getattr(grid, name)}" for name in ("tp", "cp", "dp", "pp"))
        follows = " ".join(f"{name}={getattr(core, name)}" for name in names)
        return [f"{layout} global_batch={options.training.global_batch_size}", follows]

    def line_refusals(self, text):
        """Show all problems of these flags alone, of those too that hide others."""
        world, _, flags = text.partition(" ")
        return [f"{problem}: {fix}" for problem, fix in arguments.refusals(flags, int(world), has_te=False)[1]]


class Check(Player):
    """What ``ft check`` says of flags on a machine without a GPU."""

    def line_base(self, text):
        """From now on these flags of the trainer stand before all others."""
        self.base = text

    def line_text(self, text):
        """Show the answer to ``FLAGS OF FT CHECK | FLAGS OF THE TRAINER``, without the networks of this machine."""
        lines = self._ask(text)
        return lines[: next((i for i, line in enumerate(lines) if line.startswith("network:")), None)]

    def line_check(self, text):
        """Show the first line of the answer, and what programs get instead of it, without what this machine adds."""
        told = [line for line in self._ask(text, "--json") if not line.startswith(("networks: ", "known_faults: "))]
        return [self._ask(text)[0], *told]

    def _ask(self, text: str, *more: str) -> list[str]:
        before, _, flags = text.partition("|")
        script = next((word for word in before.split() if word.endswith(".py")), f"{CHECKOUT}/pretrain_gpt.py")
        words = [word for word in before.split() if word != script]
        with mock.patch.object(needs, "may_have_gpu", lambda: False):
            return self.ft(["check", *more, *words, script, *self.base.split(), *flags.split()])


class Checkout(Player):
    """A checkout of Megatron-LM with the functions that the adapter relies on, and flags for its script."""

    def __init__(self, folder):
        super().__init__(folder)
        self.root = plant(folder)

    def do_replace(self, name, old="", new=""):
        """A file has other text in one place, or is as it was planted."""
        text = FILES[name]
        assert old in text
        (self.root / name).write_text(text.replace(old, new))

    def do_remove(self, name):
        (self.root / name).unlink()

    def do_hooks(self):
        """Show which hooks of the checkout do not fit, and what is said of its release."""
        found = tree.read(self.root)
        unfit = [f"{one.hook.symbol}: {one.status}" for one in hooks.check_tree(self.root) if one.status != hooks.FITS]
        problems = [f"{problem}: {fix}" for problem, fix in hooks.problems(found)]
        return [*unfit, *problems, *filter(None, [hooks.notice(found)])] or ["all hooks fit"]

    def line_examine(self, text):
        """Show the problems of flags on ``N`` ranks, ``N/R`` with R replicas, and whether hot-swap is on."""
        world, _, flags = text.partition(" ")
        size, _, replicas = world.partition("/")
        script = Script(str(self.root / "pretrain_gpt.py"), False, flags.split())
        options, problems = checkouts.examine(script, int(size), int(replicas or 0))
        return [f"{problem}: {fix}" for problem, fix in problems] or [
            f"hot-swap {'on' if options.fault_tolerance.ft_hot_swap else 'off'}"
        ]

    def line_choose(self, text):
        """Show whether NVIDIA's trainer runs with these flags, and the flags that are left; ``0.19.2 FLAGS``."""
        release, _, flags = text.partition(" ")
        number = None if release == "none" else tuple(map(int, release.split(".")))
        is_nvidias, left = tree.choose(flags.split(), number)
        return [f"{'NVIDIA' if is_nvidias else 'the reference'}: {' '.join(left)}"]

    def line_resuming(self, text):
        """Show the flags of a warm restart, where the named folder has a checkpoint."""
        saved, _, flags = text.partition(" ")
        return [" ".join(resuming(flags.split(), lambda folder: folder == saved))]

    def do_losses(self, *reports):
        """Show the name of the loss that replicas add up; a list of numbers is a tensor."""
        return [loss_name([_losses(one) for one in reports])]


def _losses(value):
    if isinstance(value, dict):
        return {name: _losses(each) for name, each in value.items()}
    return torch.tensor(value) if isinstance(value, list) else value


class Plans(Player):
    """Plans of ``ft plan``, and of ``ft dmr``, with a profile and its plan for a pipeline of two stages."""

    BUDGET = "2500"

    def do_profile(self):
        write_trace(self.folder / "profile.json", pipeline_trace(Pipeline(2, 2, comm_us=5.0), tp_us=12.0))
        self.ft(["dmr", "plan", "RUN/profile.json", "--memory-budget", self.BUDGET, "--out", "RUN/plan.json"])

    def line_wrong(self, text):
        """Show what is said of the profile, and of the plan that has it, with changes: ``ops/3/t_us=-1``, ``-ops``."""
        of_profile = self._with(text, "profile.json", "", ["dmr", "plan", "--memory-budget", "80GB"])
        of_plan = self._with(text, "plan.json", "trace/", ["dmr", "explain"])
        same = [line.replace("profile.json", "plan.json") for line in of_profile] == of_plan
        return of_profile if same else [*of_profile, *of_plan]

    def line_wrong_plan(self, text):
        return self._with(text, "plan.json", "", ["dmr", "explain"])

    def _with(self, changes: str, name: str, at: str, command: list[str]) -> list[str]:
        values = json.loads((self.folder / name).read_text())
        for word in changes.split():
            path, is_set, value = word.removeprefix("-").partition("=")
            *places, last = (at * (not path.startswith("version")) + path).split("/")
            into = values
            for place in places:
                into = into[_key(into, place)]
            if not is_set:
                del into[_key(into, last)]
            elif last == "+":
                into.append(json.loads(value))
            else:
                into[_key(into, last)] = json.loads(value)
        (self.folder / "changed").mkdir(exist_ok=True)
        (self.folder / "changed" / name).write_text(json.dumps(values))
        return self.ft([*command, f"RUN/changed/{name}"])


def _key(values, place: str):
    return int(place) if isinstance(values, list) else place


PLAYERS = {"check": Check, "trainer": Trainer, "checkout": Checkout, "plan": Plans}
