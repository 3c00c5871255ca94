"""Contract tests for authors of sinks and stores, as test classes to inherit.

A subclass implements how to reach its tracker, and pytest runs the inherited tests::

    import pytest

    pytest.register_assert_rewrite("memlog.testing")  # in conftest.py: failed assertions show values
    from memlog.testing import SinkContract

    class TestMySink(SinkContract):
        @pytest.fixture(autouse=True)
        def _tracker(self, tmp_path):
            self.tracker = start_my_tracker(tmp_path)

        def open_sink(self, target):
            return MySink(target, self.tracker.url)
        ...

memlog's own integrations run the same tests. No module here imports pytest. `limits` and `tensor_growth`
are for memlog's plugin for pytest (``memlog_pytest``).
"""

from memlog.testing.readback import Row, Shown, Time
from memlog.testing.sinks import SinkContract
from memlog.testing.stores import ArtifactStoreContract

__all__ = ["ArtifactStoreContract", "Row", "Shown", "SinkContract", "Time"]
