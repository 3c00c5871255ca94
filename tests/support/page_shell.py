"""A page's own process: runs each line of its input, a block of Python, and sends back its output."""

import contextlib
import io
import json
import sys
from typing import Any

names: dict[str, Any] = {"__name__": "__main__"}
for line in sys.stdin:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(json.loads(line), "page", "exec"), names)  # noqa: S102 - as a reader would
    print(json.dumps(output.getvalue()), flush=True)
