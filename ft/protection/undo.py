"""Keep the state before an iteration, so that the iteration can be rolled back if it was computed wrongly.

The state is copied in the background during forward and backward, which do not change it. The optimizer step waits
until the copy is complete.
"""

from ft.protection.position import Position
from ft.protection.training_state import TrainingState
from ft.state.snapshot.buffers import Slot
from ft.state.snapshot.copier import Copier, Plan, Progress, device_of, tables_of, write_back
from ft.state.snapshot.state import pack_meta, unpack_meta


class Undo:
    """The rollback copy of one rank.

    Args:
        subject: model, optimizer and learning-rate schedule.
        position: the trainer's remaining state: number of the committed step, data position and the like.
    """

    def __init__(self, subject: TrainingState, position: Position):
        self._subject, self._position = subject, position
        self._slot, self._copier = Slot(), Copier()
        self._plan: Plan | None = None
        self._progress: Progress | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Start copying the state at the beginning of an iteration."""
        state = self._subject.state(self._position.get())
        sections = state.sections()
        if self._plan is None or not self._plan.fits(self._slot, sections):
            self._slot.fit(tables_of(sections), pinned=device_of(sections) is not None)
            self._plan = Plan(self._slot, sections)
        # The part of the state that is not tensors: JSON values and byte strings.
        self._slot.set_meta(pack_meta(state.envelope, state.blobs))
        self._progress = self._copier.start(self._plan, self._note)

    def wait(self) -> None:
        """Wait until the copy is complete, because the state is about to change.

        Raises:
            RuntimeError: the state could not be copied.
        """
        if self._progress is not None:
            self._progress.wait()
            self._progress = None
        if self._error is not None:
            raise RuntimeError("the state before the iteration could not be copied") from self._error

    def roll_back(self) -> None:
        """Restore the state that the last ``begin`` copied. All ranks have to call it.

        Raises:
            RuntimeError: the state could not be copied, or ``begin`` was not called.
        """
        self.wait()
        if self._plan is None:
            raise RuntimeError("there is no copy to go back to: begin() was not called")
        self._subject.abandon_step()
        write_back(self._slot, self._plan.sections)
        position = self._subject.apply_envelope(unpack_meta(self._slot.meta))
        self._subject.publish_parameters()
        self._position.set(position)

    def close(self) -> None:
        """Stop the background copier."""
        self._copier.close()

    def _note(self, error: BaseException | None) -> None:
        self._error = error
