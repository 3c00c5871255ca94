"""What holds for every test."""

import os

import pytest
from support.seeds import SeedsPlugin

# Two threads of torch's that wait for each other on two busy cores were eight times slower than one. Set
# before torch is imported, so that the programs that tests start have it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest.register_assert_rewrite("memlog.testing")  # what a contract finds is told with its values

pytest_plugins = ["pytester"]


def pytest_configure(config: pytest.Config) -> None:
    """Lets docs/seeds.md be judged at the end of a whole run."""
    config.pluginmanager.register(SeedsPlugin(), "memlog-seeds")
