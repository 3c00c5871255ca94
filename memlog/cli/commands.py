"""The commands of the command line."""

from __future__ import annotations

from memlog.cli.advise import advise_run
from memlog.cli.compare import compare_runs
from memlog.cli.completion import completion
from memlog.cli.demo import demo
from memlog.cli.estimate import estimate_step
from memlog.cli.open import open_file
from memlog.cli.pull import pull
from memlog.cli.report import report_run
from memlog.cli.run import run
from memlog.cli.runs import runs
from memlog.cli.show import show
from memlog.cli.sync import sync
from memlog.cli.watch import watch

COMMANDS = (
    advise_run,
    compare_runs,
    completion,
    demo,
    estimate_step,
    open_file,
    pull,
    report_run,
    run,
    runs,
    show,
    sync,
    watch,
)
