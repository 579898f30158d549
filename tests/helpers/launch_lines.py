"""Launch lines of NVIDIA's functional tests, read from Megatron-LM trees that lie beside the checkout.

``MEGATRON_LM_TREES`` names the folder of the trees (default: ``../shared/megatron_lm``).
"""

import os
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
_CASES = "tests/functional_tests/test_cases"


def trees() -> list[Path]:
    """Return the folders of the Megatron-LM trees that were found, sorted by name."""
    folder = Path(os.environ.get("MEGATRON_LM_TREES", ROOT.parent / "shared/megatron_lm"))
    return sorted(folder.glob("core_v*")) if folder.is_dir() else []


def lines_of(tree: Path) -> dict[str, list[str]]:
    """Return name of the test -> words of its command line. The shell variable ``REPEAT`` is replaced by 1."""
    found = {}
    for file in sorted((tree / _CASES).glob("*/*/model_config.yaml")):
        given = yaml.safe_load(file.read_text(encoding="utf-8")).get("MODEL_ARGS")
        if given:
            found["/".join(file.parts[-3:-1])] = _words(given)
    return found


def _words(given: dict) -> list[str]:
    words: list[str] = []
    for flag, value in given.items():
        if value is False:
            continue
        words.append(flag)
        if value is not True:
            words.append(str(value).replace("${REPEAT}", "1"))
    return words


def resuming(tree: Path) -> set[str]:
    """Return the names of the tests whose run is resumed from a checkpoint."""
    found = set()
    for file in (tree / _CASES).glob("*/*/model_config.yaml"):
        kind = yaml.safe_load(file.read_text(encoding="utf-8")).get("TEST_TYPE", "")
        if kind in ("ckpt-resume", "frozen-resume"):
            found.add("/".join(file.parts[-3:-1]))
    return found
