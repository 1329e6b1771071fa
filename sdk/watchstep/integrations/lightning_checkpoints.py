"""Checkpoints that Lightning saves: the recording is told, and those that may be the last good one are deleted later."""

from __future__ import annotations

from typing import Any

from watchstep.integrations.recording import Recording


class KeptCheckpoints:
    """Stands before a Trainer's ``save_checkpoint`` and its strategy's ``remove_checkpoint`` for as long as a fit goes on.

    All that deletes goes that way: ``save_top_k``, ``save_last`` and callbacks of the program's own. What is kept for now is deleted
    after a later checkpoint, as soon as it may be.
    """

    def __init__(self, trainer: Any, recording: Recording) -> None:
        self._recording = recording
        self._trainer, self._strategy = trainer, trainer.strategy
        self._save, self._remove = trainer.save_checkpoint, trainer.strategy.remove_checkpoint
        self._later: dict[str, Any] = {}
        trainer.save_checkpoint = self._saved
        trainer.strategy.remove_checkpoint = self._removed

    def let_go(self) -> None:
        """The fit is over. What may be the last good checkpoint still then stays."""
        self._delete_what_may_be()
        for held, name in ((self._trainer, "save_checkpoint"), (self._strategy, "remove_checkpoint")):
            vars(held).pop(name, None)

    def _saved(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        self._save(filepath, *args, **kwargs)
        self._later.pop(str(filepath), None)
        if self._trainer.is_global_zero:
            self._recording.saved(str(filepath))
        self._delete_what_may_be()

    def _removed(self, filepath: Any) -> None:
        if str(filepath) in self._recording.protected():
            self._later[str(filepath)] = filepath
        else:
            self._remove(filepath)

    def _delete_what_may_be(self) -> None:
        protected = self._recording.protected()
        for name in [name for name in self._later if name not in protected]:
            self._remove(self._later.pop(name))
