"""A notebook with a real kernel, as Jupyter runs it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

Message = dict[str, Any]
SECONDS = 180


class Notebook(NotebookClient):
    """Runs cells one after the other, and keeps all that the kernel sends meanwhile.

    Attributes:
        messages: of the last cell, in their order.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        manager = self._manager = AsyncKernelManager(kernel_name="python3", transport="ipc")
        empty = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
        super().__init__(empty, km=manager, timeout=SECONDS, allow_errors=True)
        self._environment = {**os.environ, "IPYTHONDIR": str(folder / "ipython"), **environment}
        self._folder = folder
        self._interrupts_at: Callable[[Message], bool] | None = None
        self._tasks: list[asyncio.Future[Any]] = []
        self.messages: list[Message] = []

    @contextmanager
    def running(self) -> Iterator[Notebook]:
        """With its kernel, until then."""
        with tempfile.TemporaryDirectory(prefix="kernel") as short:  # a socket's name has a hundred letters
            self._manager.ip = f"{short}/k"
            with self.setup_kernel(cleanup_kc=True, cwd=str(self._folder), env=self._environment):
                yield self

    def run(self, source: str, interrupt_at: Callable[[Message], bool] | None = None) -> list[NotebookNode]:
        """Run a cell; what stands below it then.

        Args:
            source: of the cell.
            interrupt_at: says of a message whether a person presses the button for an interrupt there.
        """
        self.messages, self._interrupts_at = [], interrupt_at
        self.nb.cells.append(nbformat.v4.new_code_cell(source))  # type: ignore[no-untyped-call]
        self.execute_cell(self.nb.cells[-1], len(self.nb.cells) - 1)
        return list(self.nb.cells[-1].outputs)

    def text(self, source: str) -> str:
        """Run a cell that must not fail; what it printed to standard output."""
        outputs = self.run(source)
        assert not [each for each in outputs if each.output_type == "error"], outputs
        return stream(outputs, "stdout")

    def process_message(self, msg: Message, cell: NotebookNode, cell_index: int) -> Any:
        """As every notebook does with what its kernel sends."""
        self.messages.append(msg)
        if self._interrupts_at is not None and self._interrupts_at(msg):
            self._interrupts_at = None
            self._tasks.append(asyncio.ensure_future(self._manager.interrupt_kernel()))
        return super().process_message(msg, cell, cell_index)


def stream(outputs: list[NotebookNode], name: str) -> str:
    """What went to standard output or error."""
    return "".join(each.text for each in outputs if each.output_type == "stream" and each.name == name)
