"""The program's lines that call what runs in no module."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any, Final

import torch

MAX_LINES: Final = 1000
"""Lines that are told apart at most."""
_LONGEST: Final = 40
"""Characters of a name."""
_MEMLOG: Final = f"{Path(__file__).absolute().parents[1]}{os.sep}"
_TORCH: Final = f"{Path(torch.__file__).absolute().parent}{os.sep}"
_WRAPPERS: Final = frozenset(("wrapper", "inner", "decorate_context"))


class Callers:
    """Numbers lines of the program in the order in which they are met, from 1 on.

    Attributes:
        lines: ``train.py:42 in step: cross_entropy``: the file without its folder, the function that the line
            is in, and the function of torch's that it calls, if that is written in Python.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._numbers: dict[str, int] = {}
        self._known: dict[tuple[str, int, str], int] = {}
        self._libraries: dict[str, bool] = {}

    def here(self) -> int:
        """The number of the line that has called, outside torch and memlog; 0: none, or one too many."""
        frame: Any = sys._getframe(1)
        called = ""
        while frame is not None:
            code = frame.f_code
            torchs = self._libraries.get(code.co_filename)
            if torchs is None:
                torchs = self._look_at(code.co_filename)
                if torchs is None:
                    return self._number(code, frame.f_lineno, called)
            name = code.co_name
            if torchs and not name.startswith(("_", "<")) and name not in _WRAPPERS:
                called = name
            frame = frame.f_back
        return 0

    def _look_at(self, file: str) -> bool | None:
        """Whether a file is torch's rather than memlog's; ``None`` for one of neither."""
        if not file.startswith((_MEMLOG, _TORCH)):
            return None
        torchs = self._libraries[file] = file.startswith(_TORCH)
        return torchs

    def _number(self, code: CodeType, line: int, called: str) -> int:
        key = code.co_filename, line, called
        number = self._known.get(key)
        if number is None:
            number = self._number_of(_text(code, line, called))
            if len(self._known) < MAX_LINES:
                self._known[key] = number
        return number

    def _number_of(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            if len(self.lines) >= MAX_LINES:
                return 0
            self.lines.append(text)
            number = self._numbers[text] = len(self.lines)
        return number


def _text(code: CodeType, line: int, called: str) -> str:
    function = "" if code.co_name == "<module>" else f" in {_short(code.co_name)}"
    called = f": {_short(called)}" if called else ""
    return f"{_short(Path(code.co_filename).name)}:{line}{function}{called}"


def _short(name: str) -> str:
    shown = "".join(one if one.isprintable() else "?" for one in name)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
