"""Process of the agent of one replica (a full copy of the model): an ordinary ``ft run``, configured by the
launcher.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from ft import faults as inject
from ft.base import bounded_json
from ft.base.errors import UserError
from ft.job.agent.options import Cluster, RunOptions, Script
from ft.job.agent.suspects import LeftOut
from ft.job.control.timeouts import Timeouts
from ft.platform import processes


def pack(options: RunOptions, faults: list[inject.Fault], began: float | None) -> str:
    """Encode the arguments of :func:`main` as JSON. ``began``: wall-clock time of the replica's first epoch, None
    before it.
    """
    values = {**asdict(options), "run_dir": str(options.run_dir)}
    return json.dumps({"options": values, "faults": inject.to_json(faults), "began": began})


def unpack(text: str) -> tuple[RunOptions, list[inject.Fault], float | None]:
    """Decode what :func:`pack` has encoded."""
    given = bounded_json.loads(text, non_finite=True)
    values = given["options"]
    values |= {"script": Script(**values["script"]), "cluster": Cluster(**values["cluster"])}
    values |= {"run_dir": Path(values["run_dir"]), "timeouts": Timeouts(**values["timeouts"])}
    values |= {"left_out": LeftOut(**values["left_out"])}
    return RunOptions(**values), inject.from_json(given["faults"]), given["began"]


def main() -> None:
    """Run the agent described by the file ``sys.argv[1]``, written with :func:`pack`; exit with its exit code."""
    from ft.job.agent.carry_out import carry_out

    options, faults, began = unpack(Path(sys.argv[1]).read_text())
    processes.set_name(f"ft-{options.run_dir.name}")
    try:
        code = carry_out(options, faults, began=began)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may be inside torch's store: a normal interpreter shutdown would abort the process
