"""Keep the state before an iteration, so that the iteration can be rolled back if it was computed wrongly.

The state is copied in the background during forward and backward, which do not change it. The optimizer step waits
until the copy is complete.
"""

from typing import Protocol

from ft.protection.position import Position
from ft.protection.training_state import TrainingState
from ft.state.snapshot.buffers import Slot
from ft.state.snapshot.copier import Copier, CopyPlan, CopyProgress, device_of, tables_of, write_back
from ft.state.snapshot.state import Sections, pack_meta, unpack_meta


class SharedCopy(Protocol):
    """A copy of the tensors of a training state that another layer keeps."""

    def is_current(self) -> bool:
        """Return whether it is, or will soon be, a copy of the live tensors."""

    def wait(self) -> None:
        """Wait until it is complete, because the live tensors are about to change."""

    def write_back(self, sections: Sections) -> None:
        """Copy it into the live tensors: name of a section -> name -> tensor."""


class OwnCopy:
    """A copy that this rank makes in the background."""

    def __init__(self) -> None:
        self._slot, self._copier = Slot(), Copier()
        self._plan: CopyPlan | None = None
        self._progress: CopyProgress | None = None
        self._error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        return self._slot.nbytes

    def take(self, sections: Sections) -> None:
        """Start copying the live tensors."""
        if self._plan is None or not self._plan.fits(self._slot, sections):
            self._slot.fit(tables_of(sections), pinned=device_of(sections) is not None)
            self._plan = CopyPlan(self._slot, sections)
        self._progress = self._copier.start(self._plan, self._note)

    def free(self) -> None:
        """Free the memory of the copy."""
        if self._progress is not None:
            self._progress.wait()
        self._slot, self._plan, self._progress, self._error = Slot(), None, None, None

    def wait(self) -> None:
        """Wait until the copy is complete.

        Raises:
            RuntimeError: the tensors could not be copied.
        """
        if self._progress is not None:
            self._progress.wait()
            self._progress = None
        if self._error is not None:
            raise RuntimeError("the state before the iteration could not be copied") from self._error

    def write_back(self, sections: Sections) -> None:
        write_back(self._slot, sections)

    def close(self) -> None:
        """Stop the background thread."""
        self._copier.close()

    def _note(self, error: BaseException | None) -> None:
        self._error = error


class Undo:
    """The rollback copy of one rank.

    Args:
        position: the trainer's remaining state: number of the committed step, data position and the like.

    Attributes:
        nbytes: host memory that it takes for tensors, in bytes.
    """

    def __init__(self, subject: TrainingState, position: Position):
        self._subject, self._position = subject, position
        self._own = OwnCopy()
        self._shared: SharedCopy | None = None
        self._used: OwnCopy | SharedCopy | None = None
        self._meta = b""
        self._sections: Sections = {}

    @property
    def nbytes(self) -> int:
        return self._own.nbytes

    def share(self, copy: SharedCopy) -> None:
        """Use ``copy`` whenever it is current, instead of copying the tensors once more."""
        self._shared = copy

    def begin(self) -> None:
        """Start copying the state at the beginning of an iteration."""
        state = self._subject.state(self._position.get())
        # the part of the state that is not tensors: JSON values and byte strings
        self._meta, self._sections = pack_meta(state.envelope, state.blobs), state.sections()
        if self._shared is not None and self._shared.is_current():
            self._own.free()
            self._used = self._shared
        else:
            self._own.take(self._sections)
            self._used = self._own

    def wait(self) -> None:
        """Wait until the copy is complete, because the state is about to change.

        Raises:
            RuntimeError: the state could not be copied.
        """
        if self._used is not None:
            self._used.wait()

    def roll_back(self) -> None:
        """Restore the state that the last ``begin`` copied. All ranks have to call it.

        Raises:
            RuntimeError: the state could not be copied, or ``begin`` was not called.
            RecoverableError: the copy that another layer keeps is damaged.
        """
        self.wait()
        if self._used is None:
            raise RuntimeError("there is no copy to go back to: begin() was not called")
        self._subject.abandon_step()
        self._used.write_back(self._sections)
        position = self._subject.apply(unpack_meta(self._meta))
        self._subject.publish_parameters()
        self._position.set(position)

    def close(self) -> None:
        """Stop the background copier."""
        self._own.close()
