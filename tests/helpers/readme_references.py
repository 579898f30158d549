"""References in the Markdown documents: to files, to headings, and to names in the code."""

import ast
import re
from functools import cache
from pathlib import Path

from agent_jobs import ROOT
from readme_commands import DOCUMENTS, without_fences


def paths() -> list[tuple[str, str]]:
    """Return (document, path) of each file or folder of the repository that a document names or links to."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        named = re.findall(r"`((?:tools|tests|examples|ft|megatron|docs)/[\w./-]+)`", text)
        found += [(document, path) for path in named]
        found += [(document, path) for path, _ in _links(document, text) if path]
    return found


def is_there(path: str) -> bool:
    return Path(ROOT, path).exists()


def missing_headings() -> list[tuple[str, str]]:
    """Return (document, link) of each link to a heading that its target does not have."""
    missing = []
    for document in DOCUMENTS:
        for path, heading in _links(document, (ROOT / document).read_text()):
            if heading and heading not in _headings(path or document):
                missing.append((document, f"{path}#{heading}"))
    return missing


def missing_names() -> list[tuple[str, str]]:
    """Return (document, name) of each dotted name of this project, in backticks or of a page of the public interface,
    that the sources do not define.
    """
    missing = []
    for document in DOCUMENTS:
        text = without_fences((ROOT / document).read_text())
        names = re.findall(r"(?:`|^::: )((?:ft|megatron\.(?:ft_trainer|patches))(?:\.\w+)+)(?:`|$)", text, re.MULTILINE)
        missing += [(document, name) for name in dict.fromkeys(names) if not is_defined(name)]
    return missing


def is_defined(name: str) -> bool:
    """Return whether a dotted name is a module of the sources, or is defined at a module's top level or in a class."""
    words = name.split(".")
    for length in range(len(words), 0, -1):
        place = ROOT.joinpath(*words[:length])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file() and (length == len(words) or _defines(file, tuple(words[length:]))):
                return True
    return False


@cache
def _defines(file: Path, words: tuple[str, ...]) -> bool:
    text = file.read_text()
    body, (first, *rest) = ast.parse(text).body, words
    found = [node for node in body if first in _names_of(node)]
    if not found:
        return not rest and file.name == "__init__.py" and f'"{first}": ' in text  # loaded on first access
    members = [member for node in found for member in getattr(node, "body", [])]
    return not rest or any(rest == [name] for member in members for name in _names_of(member))


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [getattr(node, "name", ""), *(target.id for target in targets if isinstance(target, ast.Name))]


def _links(document: str, text: str) -> list[tuple[str, str]]:
    """Return (path from the repository's root or "", heading or "") of each link that stays in the repository."""
    found = re.findall(r"\]\((?!https?:)([\w./-]*)(?:#([\w-]+))?\)", text)
    beside = (ROOT / document).parent
    return [(str((beside / path).resolve().relative_to(ROOT.resolve())) if path else "", to) for path, to in found]


@cache
def _headings(document: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub generates them."""
    titles = re.findall(r"^#+ (.+)$", without_fences((ROOT / document).read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
