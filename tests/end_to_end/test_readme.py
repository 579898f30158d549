"""Every command of README.md, CONTRIBUTING.md and docs/ runs, scaled down, ends, and prints what it should."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import readme_commands
import readme_references
import readme_walk
from agent_jobs import ROOT, Command
from harness.started import REAL
from readme_walk import Walk

from ft.faults.page import PAGE

COMMANDS = [command.text for command in readme_commands.documented()]
PROGRAMS = {
    "ft": [sys.executable, "-m", "ft"],
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
SHOWN = ("examples", "tools", "tests", "pretrain_gpt.py")


class Walker:
    """Runs commands in one folder, which looks like the repository's; a command that others need runs once.

    Attributes:
        folder: begins without the folders that commands of the documents make.
    """

    def __init__(self, folder: Path):
        self.folder, self._ended = folder, {}
        for name in SHOWN:
            (folder / name).symlink_to(ROOT / name)
        sources = folder / "sources"
        sources.mkdir()
        for source in sorted((ROOT / "ft").rglob("*.py"))[:60]:
            (sources / f"{len(list(sources.iterdir()))}.txt").write_text(source.read_text())

    def run(self, command: str) -> str:
        """The output of a command that has ended as its entry says; AssertionError otherwise."""
        if command not in self._ended:
            try:
                self._ended[command] = self._run(command, readme_walk.entry_for(command))
            except AssertionError as error:
                self._ended[command] = error
        if isinstance(self._ended[command], AssertionError):
            raise self._ended[command]
        return self._ended[command]

    def _run(self, command: str, walk: Walk) -> str:
        for earlier in COMMANDS:
            if (entry := readme_walk.entry_for(earlier)) and entry.name in walk.after:
                self.run(earlier)
        if walk.before:
            subprocess.run(walk.before, shell=True, cwd=self.folder, check=True, timeout=180)
        code, said = start(self.folder, walk.scaled(command), walk.limit_s)
        assert code == walk.code, f"ended with {code}: {said[-6000:]}"
        for words in walk.says:
            assert words in said, f"it does not say {words!r}: {said[-6000:]}"
        for file in walk.makes:
            assert (self.folder / file).stat().st_size > 0, f"{file} is empty: {said[-6000:]}"
        return said


def start(folder: Path, command: str, limit_s: float) -> tuple[int, str]:
    """Run a command in a folder to its end, as a user does; return its exit code and output, and leave no process."""
    program, *words = shlex.split(command)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = Command(folder, [*PROGRAMS[program], *words], OMP_NUM_THREADS="1", PATH=path, **{REAL: "1"})
    try:
        code = job.wait(limit_s)
    finally:
        job.close()
    return code, f"{command}\n{job.text()}"


def id_of(command: str) -> str:
    """The name of its entry, and the number of the command among those of that entry."""
    name = readme_walk.entry_for(command).name
    same = [other for other in COMMANDS if readme_walk.entry_for(other) is readme_walk.entry_for(command)]
    return name if len(same) == 1 else f"{name}-{same.index(command) + 1}"


def walked() -> list:
    """A parameter for each command that an entry runs."""
    entries = [(command, readme_walk.entry_for(command)) for command in COMMANDS]
    return [
        pytest.param(command, id=id_of(command), marks=[pytest.mark.long] * (not walk.every_time))
        for command, walk in entries
        if walk and not walk.not_run
    ]


@pytest.fixture(scope="module")
def walker(tmp_path_factory):
    return Walker(tmp_path_factory.mktemp("readme"))


def test_the_walk_knows_every_command():
    unknown = [command for command in COMMANDS if not readme_walk.entry_for(command)]
    assert not unknown, f"say in tests/helpers/readme_walk.toml how the walk runs it, or why it does not: {unknown}"


def test_every_entry_is_for_a_command():
    assert not readme_walk.unused(COMMANDS), "remove the entry, or correct its pattern"


def test_every_entry_fits_the_command_as_it_is_written():
    for command in COMMANDS:
        walk = readme_walk.entry_for(command)
        if walk and not walk.not_run:
            scaled = walk.scaled(command)
            assert not set(scaled) & set("<>") and "..." not in scaled.split(), f"a placeholder is left: {scaled}"


def test_what_the_documents_name_is_there():
    missing = [(document, path) for document, path in readme_references.paths() if not readme_references.is_there(path)]
    assert not missing


def test_every_link_to_a_heading_finds_it():
    assert not readme_references.missing_headings()


def test_what_the_documents_name_of_the_code_is_in_the_code():
    assert not readme_references.missing_names(), "the code was renamed: rename it in the document, too"


def test_the_pages_of_the_documentation_are_all_in_the_table_of_contents():
    """Pages of a folder are in the table of its own README.md."""
    tables = [document for document in readme_commands.DOCUMENTS if document.endswith("README.md")]
    shown = {path for document, path in readme_references.paths() if document in tables}
    pages = {document for document in readme_commands.DOCUMENTS if document.startswith("docs/")}
    assert not pages - shown, "link them in README.md"


def test_lines_of_markdown_have_at_most_120_columns():
    """Rows of tables and what programs print cannot be wrapped; one page is generated."""
    too_long = [
        (document, line)
        for document in readme_commands.DOCUMENTS
        if document != PAGE
        for line in readme_commands.without_fences((ROOT / document).read_text()).splitlines()
        if len(line) > 120 and not line.startswith("|")
    ]
    assert not too_long


@pytest.mark.parametrize("command", walked())
def test_a_command_does_what_is_said(walker, command):
    walker.run(command)
