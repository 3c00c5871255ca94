"""The wrapper of a W&B run's logging method, if wandb's private parts have changed."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from memlog._internal.diagnostics import Diagnostics
from memlog.in_process.row_buffer import UsersRows
from memlog_wandb.rows import watch


def log(data: object, step: int | None = None, commit: bool | None = None) -> None: ...
def other_log(*, row: object, at: int) -> None: ...


# Other arguments, another name for the step, and no method at all.
@pytest.mark.parametrize(("method", "step"), [(other_log, 0), (log, None), (None, 0)])
def test_an_unknown_run_is_left_alone(method: Callable[..., None] | None, step: int | None) -> None:
    run = SimpleNamespace(_partial_history_callback=method, _local_step=step)
    before = dict(vars(run))
    with pytest.raises(TypeError, match="memlog can't add values to rows"):
        watch(run, UsersRows(Diagnostics()))
    assert vars(run) == before
