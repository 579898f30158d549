"""Read the dumps of torch's flight recorder as one inspection of all ranks, for ``ft diagnose hang --traces``.

Every run under torchrun can write such dumps: with NCCL one file per rank at a timeout (TORCH_NCCL_DUMP_ON_TIMEOUT), or
at any time by ``torch._C._distributed_c10d._dump_fr_trace`` and ``_dump_fr_trace_json`` (also with gloo). Formats 1.x
and 2.x are read, as JSON and as pickle. A pickle is read without importing or calling anything: a file that asks for
more than plain values is refused.
"""

import ast
import io
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ft.base import bounded_json, files
from ft.base.errors import UserError
from ft.faults.hang import inspection as kinds
from ft.faults.hang.inspection import Departure, Inspection, Operation, Rank, channel, departure, operation_name

_NUMBERED = re.compile(r"(\d+)(?:\.[a-z]+)*$")
_MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)$")
_VERSIONS = ("1.", "2.")
_FIX = "give the folder with one dump per rank, each name ending with the rank, such as nccl_trace_rank_0"
_LIBRARY = ("/torch/", "torch/distributed", "torch/nn", "torch/autograd", "torch/_", "contextlib.py")


def read(folder: Path) -> Inspection:
    """Return what the dumps in a folder say of all ranks.

    A damaged dump is left out: a process may have died while it wrote it. Its rank then counts as one without a dump.

    Raises:
        UserError: there is no dump that can be read, or one asks for more than plain values or has an unknown format.
    """
    files, dumps, damaged = _files(folder), {}, []
    for rank, path in files.items():
        try:
            dumps[rank] = _load(path)
        except _Damaged as error:
            damaged.append(error)
    if not dumps:
        raise UserError(str(damaged[0]), _FIX)
    groups = _groups(dumps)
    drops = any(_first(dump) > 0 for dump in dumps.values())
    ranks = {rank: _rank(rank, dump, groups, drops) for rank, dump in dumps.items()}
    world = {member for members in groups.values() for member in members} | set(ranks)
    why = "; ".join([f"dumps of {len(ranks)} of {len(world)} ranks", *map(str, damaged)])
    return Inspection(dict(sorted(ranks.items())), groups, 0.0, why)


def _files(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder", _FIX)
    found: dict[int, Path] = {}
    for path in sorted(folder.rglob("*")):
        match = _NUMBERED.search(path.name)
        if match is None or not path.is_file():
            continue
        rank = int(match[1])
        if rank in found:
            raise UserError(f"{found[rank]} and {path} are both dumps of rank {rank}", "keep the dumps of one run only")
        found[rank] = path
    if not found:
        raise UserError(f"{folder} contains no dump of the flight recorder", _FIX)
    return found


class _Damaged(Exception):
    """A dump cannot be read."""


class _NotPlain(Exception):
    """A pickle asks for more than plain values."""


class _Plain(pickle.Unpickler):
    """An unpickler for plain values: it imports nothing and calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise _NotPlain(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _NotPlain("it asks for an object elsewhere")


def _load(path: Path) -> dict[str, Any]:
    """Return the values of one dump.

    Raises:
        UserError: it is something else, or has an unknown format.
        _Damaged: it is cut off or damaged.
    """
    try:
        data = files.read(path)
        values = bounded_json.loads(data) if data.lstrip()[:1] == b"{" else _Plain(io.BytesIO(data)).load()
    except _NotPlain as error:
        raise UserError(f"{path} is no dump of the flight recorder, and could be harmful: {error}", _FIX) from error
    except Exception as error:  # damaged bytes raise errors of any kind
        raise _Damaged(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(values, dict) or not isinstance(values.get("entries"), list):
        raise UserError(f"{path} is no dump of the flight recorder: it has no entries", _FIX)
    version = str(values.get("version", ""))
    if not version.startswith(_VERSIONS):
        raise UserError(f"{path} has the format {version or 'of no version'}", "formats 1.x and 2.x can be read")
    return values


def _first(dump: Mapping[str, Any]) -> int:
    """Return the number of the first entry: above 0, the recorder has dropped earlier ones."""
    return min((int(entry.get("record_id", 0)) for entry in dump["entries"]), default=0)


def _label(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group") or (str(entry.get("pg_name", entry.get("pg_id", "?"))), "")
    return _titled(str(group[0]), str(group[1]) if len(group) > 1 else "")


def _titled(name: str, desc: str) -> str:
    return f"{desc}/{name}" if desc and desc != "undefined" else name


def _groups(dumps: Mapping[int, Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Return name -> members of each group; where a dump does not say, those that have used the group."""
    told: dict[str, tuple[int, ...]] = {}
    users: dict[str, set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        for number, config in (dump.get("pg_config") or {}).items():
            ranks = config.get("ranks")
            ranks = ast.literal_eval(ranks) if isinstance(ranks, str) and ranks else ranks
            if ranks:
                label = _titled(str(config.get("name") or number), str(config.get("desc", "")))
                told[label] = tuple(sorted(int(one) for one in ranks))
        for entry in dump["entries"]:
            users[_label(entry)].add(rank)
    everybody = set(dumps)
    for label, ranks in users.items():
        told.setdefault(label, tuple(sorted(everybody if "default_pg" in label else ranks)))
    return told


def _rank(rank: int, dump: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]], drops: bool) -> Rank:
    entries = sorted(dump["entries"], key=lambda entry: int(entry.get("record_id", 0)))
    ended: dict[str, int] = defaultdict(int)
    numbered: dict[str, int] = defaultdict(int)
    operations, counts = [], {}
    if drops:
        # Earlier messages are not in the dump, so messages are counted from the last one that has ended.
        for entry in entries:
            if (found := _message(rank, entry, groups)) is not None and _is_done(entry):
                ended[channel(_label(entry), *found)] -= 1
    for entry in entries:
        label, message = _label(entry), _message(rank, entry, groups)
        name, peer = message if message is not None else (_name(entry), None)
        if message is None and entry.get("is_p2p"):
            continue  # a group of messages, whose parts are entries of their own
        key = channel(label, name, peer)
        numbered[key] += 1
        sequence = _sequence(entry) if peer is None else _BASE * drops + numbered[key] + ended[key]
        operations.append(_operation(entry, label, name, peer, sequence))
        counts[key] = max(counts.get(key, 0), sequence)
    last = {one.channel: one for one in operations}
    kept = tuple(one for one in operations if not one.done or last[one.channel] is one)
    return Rank(rank, counts=counts, operations=kept, departure=_departure(operations))


def _departure(operations: list[Operation]) -> Departure | None:
    """Return how the last operations depart from the pattern that the earlier ones repeat.

    The recorder does not mark steps. A training step is the longest sequence that is repeated from the first entry on;
    at least two repetitions are needed.
    """
    keys = [(one.group, one.name, one.peer, one.sizes, one.site) for one in operations]
    period, end = _repeated(keys)
    if not period or end == len(keys):
        return None
    begin = end - end % period
    found = departure(operations[begin - period : begin], operations[begin:])
    return Departure(*found) if found is not None else None


def _repeated(keys: list) -> tuple[int, int]:
    """Return (period, end) of the longest beginning that repeats itself at least once; (0, 0) if there is none.

    It is found with the Z-function: for each position, the length of what follows that equals the beginning.
    """
    equal, left, right, best = [0] * len(keys), 0, 0, (0, 0)
    for at in range(1, len(keys)):
        length = min(right - at, equal[at - left]) if at < right else 0
        while at + length < len(keys) and keys[length] == keys[at + length]:
            length += 1
        equal[at] = length
        if at + length > right:
            left, right = at, at + length
        if length >= at and at + length > best[1]:
            best = (at, at + length)
    return best


_BASE = 1 << 20
"""Number of the last message that has ended, where the true number is not known."""


def _message(rank: int, entry: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> tuple[str, int] | None:
    """Return (``kinds.SEND`` or ``kinds.RECV``, logical rank of the other end) if an entry is a message."""
    match = _MESSAGE.match(str(entry.get("profiling_name", "")).partition(":")[2])
    if match is None:
        return None
    name, members = match[1], groups.get(_label(entry), ())
    # "send 0->1" is written by 0, and "recv 1<-0" by 1; both are positions in the group
    other = int(match[3])
    return (kinds.SEND if name == "send" else kinds.RECV), members[other] if other < len(members) else other


def _name(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("profiling_name", "")).partition(":")[2].partition(" ")[0]
    return operation_name(name) or "unknown"


def _sequence(entry: Mapping[str, Any]) -> int:
    return int(entry.get("collective_seq_id", entry.get("seq_id", 0)))


def _is_done(entry: Mapping[str, Any]) -> bool:
    return entry.get("state") == "completed" or bool(entry.get("retired"))


def _operation(entry: Mapping[str, Any], label: str, name: str, peer: int | None, sequence: int) -> Operation:
    sizes = entry.get("output_sizes" if name == kinds.RECV else "input_sizes") or entry.get("output_sizes") or []
    dtypes = entry.get("output_dtypes" if name == kinds.RECV else "input_dtypes") or []
    shapes = tuple(f"{dtypes[at] if at < len(dtypes) else 'tensor'}{list(shape)}" for at, shape in enumerate(sizes))
    return Operation(label, name, sequence, peer, shapes, _is_done(entry), site=_site(entry.get("frames") or ()))


def _site(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost call outside of torch."""
    for frame in frames:
        filename = str(frame.get("filename", ""))
        if not any(part in filename for part in _LIBRARY):
            return f"{filename}:{frame.get('line', 0)} {frame.get('name', '')}"
    return ""
