"""How far a job is, for a person who waits.

The runner reports to a `Progress` and knows nothing about terminals. Without one it is silent (`SilentProgress`); a
program that owns a terminal passes `TerminalProgress`, which draws a bar with the time left, and draws nothing where
there is no terminal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress(ABC):
    """Told how many steps there are, then about each. Used as a context by the job."""

    @abstractmethod
    def start(self, title: str, total: int) -> None:
        """A job of `total` steps begins."""

    @abstractmethod
    def advance(self, stage: str, steps: int = 1) -> None:
        """`steps` more are done; `stage` is what happens now."""

    @abstractmethod
    def stop(self) -> None:
        """The job is over, or failed."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@final
class SilentProgress(Progress):
    """Says nothing."""

    def start(self, title: str, total: int) -> None:
        pass

    def advance(self, stage: str, steps: int = 1) -> None:
        pass

    def stop(self) -> None:
        pass


@final
class TerminalProgress(Progress):
    """A bar on stderr with the time left; nothing where stderr is not a terminal (pass a console to decide otherwise).

    The bar is redrawn only when told of progress: a refreshing thread would take time from what is being timed.
    """

    def __init__(self, console: Console | None = None, title: str = "") -> None:
        self._console = console or Console(stderr=True)
        self._title = title  # before the job's name: which of how many
        self._bar: RichProgress | None = None
        self._task: Any = None

    def start(self, title: str, total: int) -> None:
        if not self._console.is_terminal:
            return
        self._bar = RichProgress(
            TextColumn("[bold]{task.fields[title]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("starting", total=total, title=f"{self._title}{title}")
        self._bar.start()

    def advance(self, stage: str, steps: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=steps, description=stage)
            self._bar.refresh()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
