"""pretrain_gpt.py whose workers record, at each committed step, the traffic of each of their process groups so far."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pretrain_gpt
from ft.systems.hot_swap.recovery_manager import RecoveryManager

COUNTS = "counts-{worker}.jsonl"

_committed = RecoveryManager.committed


def committed(self) -> None:
    _committed(self)
    session = self.session
    groups = [asdict(report) for report in session.groups.reports()]
    line = {"step": self.step, "epoch": session.epoch, "rank": session.rank, "groups": groups}
    with open(Path(os.environ["FT_RUN_DIR"]) / COUNTS.format(worker=session.worker), "a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    RecoveryManager.committed = committed
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
