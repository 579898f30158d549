"""Trains scaled launch lines with this project's trainer and with NVIDIA's, and compares them bit for bit.

Lines that are equal when scaled are trained once. A result is one JSON file in the folder of results, so that the work
can be interrupted; a file that is there is not made again.
"""

import hashlib
import json
import math
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import launch_lines_scale as scaling
from launch_lines_worlds import OUT_OF_TIME, STEPS

ROOT = Path(__file__).resolve().parents[2]
SIDES = OURS, THEIRS = "ours", "theirs"
ENVIRONMENT = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

_CASE, _DOCUMENT_WORDS = "case.json", 8


@dataclass
class Case:
    """A scaled line, and the lines of NVIDIA's tests that it stands for.

    Attributes:
        flags: flags for both trainers.
        ranks: number of processes.
        resumes: whether the run stops in the middle and resumes from its checkpoint.
        names: names of the tests -> what the scaled line lacks, in words.
    """

    flags: list[str]
    ranks: int
    resumes: bool
    names: dict[str, list[str]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps([self.flags, self.ranks, self.resumes]).encode()).hexdigest()[:12]


class Trainers:
    """The warm processes of both trainers.

    Args:
        tree: folder of NVIDIA's Megatron-LM.
        into: folder of results.
        limit_s: seconds that one world may take.
    """

    def __init__(self, tree: Path, into: Path, limit_s: float):
        self._tree, self._into, self._limit_s = tree, into, limit_s
        self._processes: dict[str, subprocess.Popen] = {}
        self._data = _dataset(into)

    def train(self, case: Case, steps: int) -> dict:
        """Train a case on both sides at the same time; return the result as a JSON object."""
        with ThreadPoolExecutor(len(SIDES)) as pool:
            results = pool.map(lambda side: self._side(side, case, steps), SIDES)
            return {**asdict(case), "steps": steps, **dict(zip(SIDES, results, strict=True))}

    def train_whole(self, case: Case, steps: int) -> dict:
        """Train a case that resumes on NVIDIA's side only, without the resume; return that side's part of a result."""
        return self._side(THEIRS, replace(case, resumes=False), steps)

    def close(self) -> None:
        for process in self._processes.values():
            process.stdin.close()
            process.wait()

    def _side(self, side: str, case: Case, steps: int) -> dict:
        folder = self._into / "runs" / case.key / side
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # NVIDIA's NullTokenizer of core_v0.16 has one id more than it is told.
        is_of_016 = side == THEIRS and self._tree.name.startswith("core_v0.16")
        own = ["--data-path", self._data, "--data-cache-path", self._into / f"cache-{side}", "--num-workers", 0]
        own += ["--tokenizer-type", "NullTokenizer", "--vocab-size", scaling.VOCABULARY - is_of_016]
        flags = [*case.flags, *map(str, own), "--log-interval", "1"]
        answer = {"code": 0, "seconds": 0.0}
        for more in self._parts(folder, case, steps):
            part = self._world(side, [*flags, *more], case.ranks, folder)
            answer = {"code": part["code"], "seconds": round(answer["seconds"] + part["seconds"], 1)}
            if part["code"]:
                answer["why"] = "out of time" if part["code"] == OUT_OF_TIME else _cause(folder)
                break
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return {**answer, "figures": _figures(folder / STEPS)}

    def _parts(self, folder: Path, case: Case, steps: int) -> Iterator[list[str]]:
        """Yield the further flags of each start of a run."""
        if not case.resumes:
            yield []
            return
        store = ["--save", str(folder / "checkpoints"), "--save-interval", str(steps // 2)]
        yield [*store, "--exit-interval", str(steps // 2)]
        yield [*store, "--load", str(folder / "checkpoints")]

    def _world(self, side: str, flags: list[str], ranks: int, folder: Path) -> dict:
        request = {"flags": flags, "ranks": ranks, "folder": str(folder)}
        process = self._process(side)
        words = json.dumps({**request, "environment": ENVIRONMENT, "limit_s": self._limit_s})
        print(words, file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    def _process(self, side: str) -> subprocess.Popen:
        if side not in self._processes:
            script = (ROOT if side == OURS else self._tree) / "pretrain_gpt.py"
            with open(self._into / f"{side}.log", "w") as log:
                process = subprocess.Popen(
                    [sys.executable, Path(__file__).with_name("launch_lines_worlds.py"), script],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            if not process.stdout.readline():
                raise SystemExit(f"the trainer {script} cannot be imported; see {self._into / f'{side}.log'}")
            self._processes[side] = process
        return self._processes[side]


def cannot_resume(result: dict) -> bool:
    """Return whether NVIDIA's trainer, but not this project's, has failed in a case that resumes."""
    return result["resumes"] and bool(result[THEIRS]["code"]) and not result[OURS]["code"]


def verdict(result: dict) -> tuple[str, str]:
    """Return (word, reason) for a result.

    The word is "equal", "differs" or who failed. Steps before a failure are compared, too. It is "ours resumes" if
    NVIDIA's trainer failed after the resume, and this project's run equals NVIDIA's run without the resume.
    """
    failed = [side for side in SIDES if result[side]["code"]]
    ours, theirs = (_by_step(result[side]["figures"]) for side in SIDES)
    if difference := _difference(ours, theirs):
        return "differs", difference
    common = len(ours.keys() & theirs.keys())
    if cannot_resume(result) and not result.get("whole", {"code": 1})["code"]:
        whole = _by_step(result["whole"]["figures"])
        if ours.keys() == whole.keys() and not _difference(ours, whole):
            return "ours resumes", f"{len(whole)} steps; theirs: {result[THEIRS]['why']}"
        return "theirs fails", f"theirs: {result[THEIRS]['why']}; {_difference(ours, whole)} without the resume"
    if failed:
        why = "; ".join(f"{side}: {result[side]['why']}" for side in failed)
        word = "both fail" if len(failed) == 2 else "ours fails" if failed == [OURS] else "theirs fails"
        return word, f"{why}; the {common} steps that both took are equal"
    if ours.keys() != theirs.keys() or not ours:
        return "differs", f"ours has {len(ours)} steps, theirs {len(theirs)}"
    return "equal", f"{common} steps"


def _by_step(figures: dict[str, dict]) -> dict[int, dict]:
    return {int(step): value for step, value in figures.items()}


def _difference(ours: dict[int, dict], theirs: dict[int, dict]) -> str:
    """Return the first difference in the steps that both took; "" if there is none."""
    for step in sorted(ours.keys() & theirs.keys()):
        for name in ("loss", "grad_norm"):
            mine, other = float.fromhex(ours[step][name]), float.fromhex(theirs[step][name])
            if name == "grad_norm":  # NVIDIA's trainer logs the norm in fp32
                mine = struct.unpack("f", struct.pack("f", mine))[0]
            if mine != other and not (math.isnan(mine) and math.isnan(other)):
                return f"{name.replace('_', ' ')} of step {step}: {mine!r}, theirs {other!r}"
    return ""


def _figures(file: Path) -> dict[str, dict[str, str]]:
    """Return step -> loss and gradient norm as hex floats, from the file of either side."""
    found = {}
    for line in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
        if "losses" in line:
            loss, norm = line["losses"].get("lm loss", "nan"), line["grad_norm"]
        elif "step" in line:
            loss, norm = line["loss"].hex(), line.get("grad_norm")
        else:
            continue
        norm = "nan" if norm is None else norm if isinstance(norm, str) else norm.hex()
        found[str(line["step"])] = {"loss": loss, "grad_norm": norm}
    return found


def _cause(folder: Path) -> str:
    """Return the line that says why a run failed, from the logs of its ranks."""
    named = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|error)\b.*")
    for log in sorted(folder.glob("rank*.log"), key=lambda file: file.stat().st_mtime):
        shown = [re.sub(r"^\[rank\d+\]: +|^ +", "", line) for line in log.read_text(errors="replace").splitlines()]
        for index in reversed(range(len(shown))):
            if named.fullmatch(shown[index]):
                before = next((line for line in reversed(shown[:index]) if set(line) - set(" ^~")), "")
                return (shown[index] if ":" in shown[index] else f"{shown[index]} ({before})")[:200]
    return "see the logs of the ranks"


def _dataset(into: Path) -> Path:
    """Make the dataset of both trainers, once, from the pages of docs/; return its prefix."""
    prefix = into / "data" / "docs"
    if prefix.with_suffix(".idx").exists():
        return prefix
    prefix.parent.mkdir(parents=True, exist_ok=True)
    text = prefix.with_suffix(".jsonl")
    with text.open("w") as file:
        for page in sorted((ROOT / "docs").glob("*.md")):
            words = page.read_text(encoding="utf-8").split()
            for first in range(0, len(words), _DOCUMENT_WORDS):
                file.write(json.dumps({"text": " ".join(words[first : first + _DOCUMENT_WORDS])}) + "\n")
    tool = [sys.executable, ROOT / "tools" / "preprocess_data.py"]
    subprocess.run([*tool, "--input", text, "--json-key", "text", "--output-prefix", prefix], check=True)
    prefix.with_suffix(".meta.json").unlink()  # it names the byte tokenizer; both trainers are told the number of ids
    return prefix
