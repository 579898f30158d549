"""Each room of the repository keeps to its budget of lines, files and dataclasses (tools/size_budget.toml)."""

import subprocess
from pathlib import Path

import pytest

from tools import size_budget


def test_no_room_is_above_its_budget():
    try:
        files = size_budget.python_files()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the sizes are those of a git checkout")
    budget = size_budget.read_budget()
    rooms = {path.parent for path in files}
    assert not [room for room in budget if not any(path.is_relative_to(room) for path in rooms)], "rooms without a file"
    assert size_budget.excess(size_budget.measured(files, budget), budget) == []


def test_a_file_belongs_to_the_innermost_room_and_growth_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(size_budget, "ROOT", tmp_path)
    (tmp_path / "ft" / "net").mkdir(parents=True)
    (tmp_path / "ft" / "cli.py").write_text("import x\n")
    (tmp_path / "ft" / "net" / "a.py").write_text("@dataclass(frozen=True)\nclass A:\n    x: int\nclass B(Struct):\n")
    sizes = size_budget.measured([Path("ft/cli.py"), Path("ft/net/a.py"), Path("setup.py")], ["ft", "ft/net"])
    assert sizes == {"ft": (1, 1, 0), "ft/net": (4, 1, 2)}
    (problem,) = size_budget.excess(sizes, {"ft": (1, 1, 0), "ft/net": (4, 1, 1)})
    assert problem.startswith("ft/net has 2 dataclasses, and its budget is 1: take something away, or raise the figure")
