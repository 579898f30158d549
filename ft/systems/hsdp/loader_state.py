"""File ``RUN_DIR/loader_state`` of an FT-HSDP run: how many samples every replica has taken, as of the last committed
step.

FT-HSDP, section 4.4: the position of the data "is very small, so FT-HSDP writes the dataloader state of all GPUs into a
single loader_state file every step". The leader (rank 0) of one replica writes the file. An older step never replaces a
newer one.
"""

import contextlib
import fcntl
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ft.base import files
from ft.base.errors import UserError
from ft.systems.hsdp.samples import Count, SampleAssignment

NAME = "loader_state"
_FORMAT = "megatron-ft loader_state 2"
_LOCK_WAIT_S, _LOCK_PAUSE_S = 0.05, 0.002
_FIX = "remove it: a persistent checkpoint holds the positions of its step as well"


@dataclass(frozen=True)
class LoaderState:
    """Positions after a committed step.

    Attributes:
        batch: samples that a replica took in the step.
        positions: replica -> samples taken of its stream, for every replica of the assignment.
        quorum: number of the quorum in which it was committed.
    """

    step: Count
    quorum: Count
    batch: Count
    assignment: SampleAssignment
    positions: dict[int, Count]

    def __post_init__(self) -> None:
        if sorted(self.positions) != list(range(self.assignment.replicas)):
            raise ValueError(
                f"positions of replicas {sorted(self.positions)}, of which there are {self.assignment.replicas}"
            )

    @property
    def age(self) -> tuple[int, int]:
        """Return a sort key that is greater for a newer state.

        Quorum numbers only increase, while a run that resumes from an older checkpoint repeats steps, in later quorums.
        """
        return self.quorum, self.step


def read(run_dir: Path) -> LoaderState | None:
    """Return the state in ``run_dir``; None if there is none yet.

    Raises:
        UserError: the file is incomplete, damaged or something else.
    """
    path = run_dir / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}", "make it readable") from error
    try:
        return _decode(content)
    except ValueError as error:
        raise UserError(f"{path} ({len(content)} bytes): {error}", _FIX) from error


def write(run_dir: Path, state: LoaderState) -> str:
    """Write ``state`` into ``run_dir`` atomically, unless the file holds a newer state.

    The function blocks for 50 ms at most and never fails, because training does not depend on the file. A replica whose
    process is frozen while it writes keeps the others from writing, but not from training, until it continues or dies.

    Returns:
        "" if the state was written, else the reason why not.
    """
    try:
        with _alone(run_dir / f".{NAME}.lock") as is_alone:
            if not is_alone:
                return "another replica is writing"
            with contextlib.suppress(UserError):  # an unreadable file is replaced
                there = read(run_dir)
                if there is not None and there.age > state.age:
                    return f"step {there.step} of quorum {there.quorum} is there already"
            files.replace(run_dir / NAME, _encode(state))
            return ""
    except OSError as error:
        return str(error)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Take the file lock at ``path``; yield whether that succeeded within 50 ms.

    The operating system releases the lock if the process that holds it dies.
    """
    deadline = time.monotonic() + _LOCK_WAIT_S
    with open(path, "ab") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(_LOCK_PAUSE_S)
        yield True


class _File(msgspec.Struct):
    format: str
    checksum: str
    state: msgspec.Raw


def _encode(state: LoaderState) -> bytes:
    content = msgspec.json.encode(state)
    return msgspec.json.encode(_File(_FORMAT, _checksum(content), msgspec.Raw(content))) + b"\n"


def _decode(content: bytes) -> LoaderState:
    try:
        file = msgspec.json.decode(content, type=_File)
    except msgspec.ValidationError as error:
        raise ValueError(f"no loader_state: its format is not {_FORMAT!r}") from error
    except msgspec.DecodeError as error:
        raise ValueError("torn, or no loader_state: it is no JSON") from error
    if file.format != _FORMAT:
        raise ValueError(f"no loader_state: its format is not {_FORMAT!r}")
    if file.checksum != _checksum(bytes(file.state)):
        raise ValueError("damaged: the checksum is not that of its content")
    try:
        return msgspec.json.decode(file.state, type=LoaderState)
    except msgspec.ValidationError as error:
        raise ValueError(f"no loader_state: {error}") from error


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
