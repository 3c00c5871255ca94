"""Source files of the program. memlog searches them for the statement that adds objects to their owner."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from memlog._internal.inert_access import class_namespace, module_file
from memlog.leaks.owner_text import Owner
from memlog.tracer.attribution.calling_lines import CallingLines


def program_files(owner: Owner) -> list[str]:
    """Return source files of the program, the likeliest first.

    These files define the classes of the objects in ``owner.above``, the function or module of
    ``owner.root``, and the functions that are running now.
    """
    lines = CallingLines()
    modules = (class_namespace(type(one)).get("__module__") for one in reversed(owner.above))
    files = [*map(module_file, modules), owner.root.file, *_running_files()]
    return [one for one in dict.fromkeys(files) if one and lines.is_program(one)]


def _running_files() -> Iterator[str]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back
