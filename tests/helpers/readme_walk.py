"""How the tests run each command of the documents: the entries of ``readme_walk.toml``, which `test_readme.py` uses."""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import small_runs

_TINY = small_runs.BASE.replace("--train-iters 4", "--train-iters 8").replace("size 8", "size 12")
_WORDS = {
    "{MEGATRON}": f"{_TINY} --data-path data/corpus",
    "{BASE}": small_runs.BASE,
    "{LAST_STEP}": "iteration        8/       8",
}


@dataclass(frozen=True)
class Walk:
    """How to run the commands that match a pattern, or why they are not run here.

    Attributes:
        name: name of the test.
        pattern: pattern for whole commands; * stands for any text.
        every_time: whether it runs in the default tier; the others run in the long one.
        swaps: text in a command -> text to run instead; each has to occur.
        says: words that the output has to contain.
        makes: files that the command has to create.
        after: names of the entries that have to run before.
        before: shell commands that prepare the folder.
        code: expected exit code.
        limit_s: seconds after which the command is killed.
        only_help: run the script, whose measurement takes too long, with --help instead of its arguments.
        not_run: why it does not run here.
    """

    name: str
    pattern: str
    every_time: bool = False
    swaps: dict[str, str] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    before: str = ""
    code: int = 0
    limit_s: float = 150.0
    only_help: bool = False
    not_run: str = ""

    def fits(self, command: str) -> bool:
        return re.fullmatch(".*".join(map(re.escape, self.pattern.split("*"))), command) is not None

    def scaled(self, command: str) -> str:
        """Return the command to run instead of a documented one."""
        if self.only_help:
            return " ".join([*command.split()[:2], "--help"])
        for shown, run in self.swaps.items():
            assert shown in command, f"{self.name}: {shown!r} is not in {command!r} any more"
            command = command.replace(shown, run)
        return command


def _read() -> tuple[Walk, ...]:
    text = Path(__file__).with_suffix(".toml").read_text()
    for word, meant in _WORDS.items():
        text = text.replace(word, meant)
    return tuple(Walk(name, **entry) for name, entry in tomllib.loads(text).items())


TABLE = _read()


def entry_for(command: str) -> Walk | None:
    """Return the first entry that matches."""
    return next((walk for walk in TABLE if walk.fits(command)), None)


def unused(commands: Iterable[str]) -> list[str]:
    """Return the names of the entries that match no command."""
    used = {walk.name for command in commands if (walk := entry_for(command))}
    return [walk.name for walk in TABLE if walk.name not in used]
