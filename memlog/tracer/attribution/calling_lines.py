"""Lines of the program that call operations outside all modules."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType
from typing import Any, Final, Literal, TypeAlias

import torch

from memlog._internal.terminal import source_name

MAX_LINES: Final = 1000
"""Maximum number of different lines. All further lines have number 0."""
_LONGEST: Final = 40
"""Maximum length of a file's or function's name, in characters. Longer names are cut."""
_MEMLOG: Final = f"{Path(__file__).absolute().parents[2]}{os.sep}"
_TORCH: Final = f"{Path(torch.__file__).absolute().parent}{os.sep}"
_INSTALLED: Final = (
    "<frozen ",
    *(
        f"{sysconfig.get_path(kind)}{os.sep}"
        for kind in ("stdlib", "purelib", "platlib", "scripts")
    ),
)
_ELSEWHERE: Final = frozenset(("site-packages", "dist-packages"))
"""Names of folders that hold installed packages, in this or another Python environment."""
FileOwner: TypeAlias = Literal["program", "torch", "memlog", "installed"]
_WRAPPERS: Final = frozenset(("wrapper", "inner", "decorate_context"))


class CallingLines:
    """Register of lines of the program, numbered from 1 in the order of their first calls.

    Attributes:
        lines: Texts of the lines, such as ``train.py:42 in step: cross_entropy``. In this example, line 42 is
            in the function ``step`` and calls ``cross_entropy``, a function of torch or of another package.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._numbers: dict[str, int] = {}
        self._known: dict[tuple[str, int, str], int] = {}
        self._owners: dict[str, FileOwner] = {}

    def current_line(self) -> int:
        """Return the number of the program's line that this thread is executing; 0 if there is none.

        The program's line is the innermost line of the call stack outside torch, memlog and installed
        packages. If the whole program is an installed package, the program's line is the innermost line
        outside torch and memlog. After `MAX_LINES` different lines, new lines have number 0.
        """
        frame: Any = sys._getframe(1)
        installed: Any = None
        called = ""
        while frame is not None:
            code = frame.f_code
            owner = self._owners.get(code.co_filename) or self._owner_of(code.co_filename)
            if owner == "program":
                return self._number(code, frame.f_lineno, called)
            if owner == "installed":
                installed = installed or frame
            if (owner == "torch" and installed is None) or (owner == "installed" and not called):
                name = code.co_name
                if not name.startswith(("_", "<")) and name not in _WRAPPERS:
                    called = name
            frame = frame.f_back
        return 0 if installed is None else self._number(installed.f_code, installed.f_lineno, "")

    def current_text(self) -> str:
        """Return the text of the line that `current_line` finds; empty if `current_line` returns 0."""
        number = self.current_line()
        return self.lines[number - 1] if number else ""

    def is_program(self, file: str) -> bool:
        """Return whether a source file is outside torch, memlog and all installed packages."""
        return (self._owners.get(file) or self._owner_of(file)) == "program"

    def _owner_of(self, file: str) -> FileOwner:
        owner: FileOwner = "program"
        if file.startswith(_MEMLOG):
            owner = "memlog"
        elif file.startswith(_TORCH):
            owner = "torch"
        elif file.startswith(_INSTALLED) or not _ELSEWHERE.isdisjoint(Path(file).parts):
            owner = "installed"
        self._owners[file] = owner
        return owner

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
    return f"{_short(source_name(code.co_filename))}:{line}{function}{called}"


def _short(name: str) -> str:
    shown = "".join(one if one.isprintable() else "?" for one in name)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
