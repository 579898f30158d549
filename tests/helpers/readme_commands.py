"""Extraction of the commands in the Markdown documents.

Each line of an indented block of a document is a command. Output, code and drawings are in fenced blocks. In running
text, a span in backticks that starts like a command is a command.
"""

import re
from dataclasses import dataclass

from agent_jobs import ROOT

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("**/*.md")),
    "examples/slurm/README.md",
)
PROGRAMS = ("ft", "make", "python", "torchrun", "pip", "mpirun", "srun", "sbatch", "salloc", "scancel", "scontrol")
SCRIPTS = ("pretrain_gpt.py", "tools/", "tests/", "./tests/", "./examples/")


@dataclass(frozen=True)
class Documented:
    """A command, with single spaces and without its comment."""

    text: str
    document: str


def documented() -> list[Documented]:
    """Return the commands of all documents in order, each once.

    A span in the text that is the start of another command, such as `ft plan`, is that command's name and is left out.
    """
    shown, named = {}, {}
    for document in DOCUMENTS:
        text = without_fences((ROOT / document).read_text())
        shown |= {command: document for command in of_blocks(text) if command not in shown}
        named |= {command: document for command in of_sentences(text) if command not in named}
    found = named | shown
    begun = {name for name in named if any(command.startswith(f"{name} ") for command in found)}
    full = [command for command in (*shown, *named) if command in shown or command not in begun]
    return [Documented(command, found[command]) for command in dict.fromkeys(full)]


def of_blocks(text: str) -> list[str]:
    """Return the commands in indented blocks: each line is one."""
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    lines = [_without_comment(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line]


def of_sentences(text: str) -> list[str]:
    """Return the commands in running text, with Python scripts of this repository; a name alone is not a command."""
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    spans = [_without_comment(span).split() for span in re.findall(r"`([^`]+)`", text)]
    commands = []
    for words in spans:
        if len(words) > 1 and words[0] in PROGRAMS:
            commands.append(" ".join(words))
        elif len(words) > 1 and words[0].startswith(SCRIPTS):
            commands.append(" ".join(words if words[0].endswith(".sh") else ["python", *words]))
    return commands


def without_fences(text: str) -> str:
    """Return a document without its output, code and drawings."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _without_comment(line: str) -> str:
    return " ".join(re.sub(r"(?:^|\s)#.*", "", line).split())
