"""CI, make and pre-commit start the same scripts of the tests."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent.parent
ENTRIES = ("Makefile", ".ci/run", ".github/workflows/tests.yml", ".pre-commit-config.yaml")


def test_every_script_that_an_entry_names_is_there():
    for entry in ENTRIES:
        named = re.findall(r"(?:tests|tools|examples|\.ci)/[\w./]*\w", (ROOT / entry).read_text())
        assert named and not [path for path in named if not (ROOT / path).exists() and "$" not in path], entry


def test_ci_and_make_check_what_the_script_of_the_tests_checks():
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    commands = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert {"bash tests/run.sh fast", "bash tests/run.sh long"} <= set(commands)
    rows = workflow["jobs"]["default"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows} == {"3.11", "3.12", "3.13"}
    assert {row["core"] for row in rows} == {"0.16.1", "newest"}
    assert "bash .ci/run" in [row["command"] for row in rows]
    checks = re.search(r"check_sources\(\) \{\n(.*)\n\}", (ROOT / "tools/environment.sh").read_text())[1]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for tool in ("ruff check", "ruff format --check", "lint-imports --no-logo", "mypy"):
        assert tool in checks and any(tool in hook["entry"] for hook in hooks)
