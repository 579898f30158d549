"""The commands of a Markdown document: those of its indented blocks, and those in the text between backticks."""

import re
from dataclasses import dataclass
from pathlib import Path

from agent_jobs import ROOT

DOCUMENTS = ("README.md", "docs/what_happens_when.md", "examples/slurm/README.md")
PROGRAMS = ("ft", "python", "torchrun", "pip", "mpirun", "srun", "sbatch", "salloc", "scancel", "scontrol")
SCRIPTS = ("pretrain_gpt.py", "tools/")
NO_COMMANDS = ("-- recovery 1:", "DMR: step ", "pretrain_gpt.py             ")
"""How an indented block begins that is output, or a list of files."""


@dataclass(frozen=True)
class Documented:
    """A command, with single spaces and without its comment."""

    text: str
    document: str


def documented() -> list[Documented]:
    """The commands of all documents, each once, in their order."""
    found = {}
    for document in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
        for command in [*of_blocks(text), *of_sentences(text)]:
            found.setdefault(command, Documented(command, document))
    return list(found.values())


def of_blocks(text: str) -> list[str]:
    """Each line of an indented block is a command, unless the block begins as one of ``NO_COMMANDS`` does."""
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    lines = [
        _without_comment(line)
        for block in blocks
        if not block.strip().startswith(NO_COMMANDS)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line]


def of_sentences(text: str) -> list[str]:
    """A script of this repository is started by Python; a name alone is no command."""
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    spans = [_without_comment(span).split() for span in re.findall(r"`([^`]+)`", text)]
    commands = []
    for words in spans:
        if len(words) > 1 and words[0] in PROGRAMS:
            commands.append(" ".join(words))
        elif len(words) > 1 and words[0].startswith(SCRIPTS):
            commands.append(" ".join(["python", *words]))
    return commands


def paths() -> list[tuple[str, str]]:
    """Which document names or shows which file or folder of the repository, or one beside the document."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        named = re.findall(r"`((?:tools|tests|examples|ft|megatron|docs)/[\w./]+)`", text)
        shown = re.findall(r"\]\((?!https?:)([\w./]+)\)", text)
        found += [(document, path) for path in named]
        found += [(document, str((ROOT / document).parent.joinpath(path).relative_to(ROOT))) for path in shown]
    return found


def _without_comment(line: str) -> str:
    return " ".join(re.sub(r"(?:^|\s)#.*", "", line).split())


def is_there(path: str) -> bool:
    return Path(ROOT, path).exists()
