"""Tries releases of torch from PyPI, one after the other: import, process groups, one recovery of each system.

    python tools/experiments/torch_releases.py 2.8 2.9 2.10 2.11 2.12 2.13

PyPI's builds for x86-64 are CUDA builds, which run without a GPU as well. Each takes some 6 GB and is deleted after its
trial (``--keep``). What each release was asked is named in ``TRIALS``; the checks are tests of this project.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NEEDS = ("numpy", "scipy", "einops", "psutil", "tqdm", "matplotlib", "tensorboard", "pyyaml", "packaging", "pytest")
GROUPS = "every_operation or oldest or twice_in_a_row or beside_nccl or refused"
END_TO_END = "tests/end_to_end"
TRIALS = {
    "groups": ["tests/processes/test_groups.py", "-k", GROUPS],
    "hot-swap": [f"{END_TO_END}/test_hot_swap_faults.py", "-k", "recovered_without_a_restart and hung"],
    "FT-HSDP": [f"{END_TO_END}/test_hsdp_run.py", "-k", "a_worker_killed_anywhere"],
    "SPARe": [f"{END_TO_END}/test_spare_run.py", "-k", "lost_groups_cost_no_sample"],
    "DMR": [f"{END_TO_END}/test_dmr_injection.py", "-k", "one_flip_makes_all_ranks"],
    "CheckFree": [f"{END_TO_END}/test_checkfree_run.py", "-k", "a_middle_stage_lost"],
}


def main() -> int:
    options = _options()
    whole = True
    for release in options.releases:
        home = Path(options.envs) / f"torch{release}"
        print(f"torch {release}: {_install(home, release)}", flush=True)
        for name in options.only or TRIALS:
            passed, seconds, last = _try(home, TRIALS[name], options.limit_s)
            whole &= passed
            print(
                f"torch {release}: {name:10} {'passed' if passed else 'FAILED'} in {seconds:.0f} s: {last}", flush=True
            )
        if not options.keep:
            shutil.rmtree(home)
    return 0 if whole else 1


def _options() -> argparse.Namespace:
    cache = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    envs = os.environ.get("MEGATRON_FT_ENVS", Path(cache) / "megatron-ft")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="+", help="releases of torch, such as 2.8")
    parser.add_argument("--envs", default=envs, help=f"folder of the virtual environments (default: {envs})")
    parser.add_argument("--only", nargs="+", choices=TRIALS, help="the trials to make (default: all)")
    parser.add_argument("--keep", action="store_true", help="keep the environments; a kept one is used again")
    parser.add_argument("--limit-s", type=float, default=600.0, help="longest duration of a trial in seconds")
    return parser.parse_args()


def _install(home: Path, release: str) -> str:
    """Make the environment if it is not there, and return what is in it."""
    python = home / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
    core = "megatron-core==0.16.1" if sys.version_info < (3, 12) else "megatron-core==0.19.2"
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"torch=={release}.*", *NEEDS], check=True)
    subprocess.run([*pip, "--no-deps", core], check=True)  # it would bring a torch of its own choice
    said = "import torch, megatron.core, ft.state.groups as g; print(torch.__version__, torch.version.cuda or 'CPU')"
    return subprocess.run(
        [python, "-c", said], check=True, env=_environment(home), capture_output=True, text=True
    ).stdout.strip()


def _environment(home: Path) -> dict[str, str]:
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(ROOT), "VIRTUAL_ENV": str(home), "PATH": path}


def _try(home: Path, arguments: list[str], limit_s: float) -> tuple[bool, float, str]:
    """Run the tests. Return whether they passed, the seconds, and the last line that they printed."""
    began = time.monotonic()
    command = [home / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(
            command, check=False, cwd=ROOT, env=_environment(home), capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return False, limit_s, "it did not end in time"
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    return done.returncode == 0, time.monotonic() - began, lines[-1]


if __name__ == "__main__":
    sys.exit(main())
