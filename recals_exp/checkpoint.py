"""Training that can be stopped and continued: model, optimizer, generators and losses after a step, in `checkpoint.pt`.

Rules the code follows:

1. A checkpoint is of the moment between two steps. An interrupt is therefore kept until the step is done (a second one is not),
   and then there is a checkpoint. `every` makes others, for a process that is killed.
2. Continued training is the same as uninterrupted training, bit for bit: the batches are drawn again up to the step, and the
   generators are put back after that. What a model keeps in Python attributes is not covered.
3. A checkpoint of another configuration is not used. When training is done the file goes.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from recals_exp.keys import config_key
from recals_exp.meters.device import generator_states, restore_generator_states
from recals_exp.meters.steps import TrainStep

log = logging.getLogger(__name__)

CHECKPOINT_FILE = "checkpoint.pt"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Checkpoint:
    """The checkpoint of one job's training."""

    def __init__(self, folder: Path, step: TrainStep, config: Mapping[str, Any], every: int = 0) -> None:
        self._path = folder / CHECKPOINT_FILE
        self._step = step
        self._key = config_key(config)
        self._every = every  # steps; 0: only when interrupted
        self._interrupted = False

    def load(self) -> tuple[list[float], Mapping[str, Any]]:
        """The losses of the steps that are done, with model and optimizer put back; and what `restore_generators` takes."""
        if not self._path.is_file():
            return [], {}
        saved = torch.load(self._path, map_location=self._step.device, weights_only=True)
        if saved["key"] != self._key:
            log.warning("%s is of another configuration and is not used", self._path)
            return [], {}
        self._step.model.load_state_dict(saved["model"])
        self._step.optimizer.load_state_dict(saved["optimizer"])
        log.info("continuing after step %d, from %s", len(saved["losses"]) - 1, self._path)
        return list(saved["losses"]), saved["generators"]

    def restore_generators(self, states: Mapping[str, Any]) -> None:
        """Put the generators back, once the batches of the done steps have been drawn (rule 2)."""
        if states:
            restore_generator_states(states, self._step.device)

    def after_step(self, losses: list[float]) -> None:
        """A step is done. Saves if it is time; raises the interrupt that was kept (rule 1)."""
        if self._interrupted or (self._every and len(losses) % self._every == 0):
            self._save(losses)
        if self._interrupted:
            log.info("stopped after step %d; resume=true continues there", len(losses) - 1)
            raise KeyboardInterrupt

    def _save(self, losses: list[float]) -> None:
        state = {
            "key": self._key,
            "model": self._step.model.state_dict(),
            "optimizer": self._step.optimizer.state_dict(),
            "generators": generator_states(self._step.device),
            "losses": losses,
        }
        partial = self._path.with_name(f".{CHECKPOINT_FILE}.{os.getpid()}")
        torch.save(state, partial)
        partial.replace(self._path)

    @contextmanager
    def interrupts_kept(self) -> Iterator[None]:
        """Around training: SIGINT and SIGTERM wait for the step to end; the second one does not. Only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def keep(number: int, frame: FrameType | None) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True

        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number, handler in before.items():
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, keep)
        try:
            yield
        finally:
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)

    def remove(self) -> None:
        """Training is done (rule 3)."""
        self._path.unlink(missing_ok=True)
