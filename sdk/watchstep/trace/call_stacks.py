"""Python call stacks of operations: each distinct one is kept once, and resolved to lines when a trace is read."""

from __future__ import annotations

from pathlib import Path
from types import CodeType, FrameType

import torch

from watchstep.trace.operations import CallSite, is_library, source_texts

_MAX_DEPTH = 40
"""Maximum number of recorded frames of a stack, from the innermost."""
_HIDDEN = tuple(
    f"{Path(folder).resolve()}/" for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent)
)
"""Frames of PyTorch and of the recorder say nothing about the program."""


class CallStacks:
    """Distinct call stacks."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._stacks: list[tuple[tuple[CodeType, int], ...]] = []
        self._is_hidden: dict[int, bool] = {}
        self._code: dict[int, CodeType] = {}  # keeps the code, so that an id is not reused

    def current(self, frame: FrameType | None) -> int:
        """Return the number of the stack that ends in a frame; -1 if no frame belongs to the program."""
        key: list[int] = []
        found: list[tuple[CodeType, int]] = []
        is_hidden = self._is_hidden
        while frame is not None and len(found) < _MAX_DEPTH:
            code = frame.f_code
            number = id(code)
            hidden = is_hidden.get(number)
            if hidden is None:
                self._code[number] = code
                hidden = is_hidden[number] = code.co_filename.startswith(
                    _HIDDEN
                ) or code.co_filename.startswith("<frozen")
            if not hidden:
                key += (number, frame.f_lasti)
                found.append((code, frame.f_lasti))
            frame = frame.f_back
        if not found:
            return -1
        whole = tuple(key)
        stack = self._numbers.get(whole)
        if stack is None:
            stack = self._numbers[whole] = len(self._stacks)
            self._stacks.append(tuple(found))
        return stack

    def resolved(self) -> list[tuple[CallSite, ...]]:
        """Return the stacks as source lines, by their numbers."""
        return [tuple(_site(code, instruction) for code, instruction in stack) for stack in self._stacks]

    def sources(self) -> dict[str, str]:
        """Return the text of each source file of the program, those of installed packages left out."""
        return source_texts(code.co_filename for stack in self._stacks for code, _ in stack)


def _site(code: CodeType, instruction: int) -> CallSite:
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
            break
    return CallSite(code.co_filename, line, code.co_name, is_library(code.co_filename))
