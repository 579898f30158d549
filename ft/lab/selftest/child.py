"""The process of one check: it calls the check's function and writes the result to a file.

``sys.argv[1:]`` is (the check's "module:function", the encoded :class:`~ft.lab.selftest.values.Context`).
"""

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from ft.base import bounded_json, files
from ft.base.errors import UserError
from ft.lab.selftest.values import FAIL, PASS, SKIPPED, Context, Failed, Result, Skipped

RESULT = "result.json"
_CHECKS = "ft.lab.selftest.checks"
_NOT_FORESEEN = "an error that this check does not foresee: see its log, and report it"


def main() -> None:
    """Run the check, and end the process without waiting for threads that may be blocked in a driver."""
    function, text = sys.argv[1:]
    context = Context.decode(text)
    write(context.scratch / RESULT, run(function, context))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run(function: str, context: Context) -> Result:
    """Call "module:function" and return its result; every exception becomes one."""
    module, _, name = function.partition(":")
    try:
        found, measured = getattr(importlib.import_module(f"{_CHECKS}.{module}"), name)(context)
        return Result(PASS, found, measured=measured)
    except Skipped as reason:
        return Result(SKIPPED, str(reason))
    except Failed as failure:
        return Result(FAIL, failure.problem, failure.fix, failure.measured)
    except UserError as error:
        return Result(FAIL, error.problem, error.fix or "")
    except Exception as error:
        traceback.print_exc()
        return Result(FAIL, f"{type(error).__name__}: {error}", _NOT_FORESEEN)


def write(path: Path, result: Result) -> None:
    """Write the result such that a reader sees all of it or nothing."""
    files.replace(path, json.dumps(asdict(result)))


def read(path: Path) -> Result | None:
    """Return the result in a file, None if there is no such file."""
    try:
        return Result(**bounded_json.loads(path.read_text(), non_finite=True))
    except FileNotFoundError:
        return None
