"""``python -m memlog.delivery``: the helper process, started by memlog.init()."""

from __future__ import annotations

import os
import sys

# `python -m` puts the working directory first on the path, where a folder of the user's named `mlflow`
# or `wandb` would be taken for the package.
if sys.path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109 - compared with what the interpreter wrote
    del sys.path[0]

from memlog.delivery.helper import main

if __name__ == "__main__":
    main()
