"""Messages on the standard streams."""

import pytest

from memlog._internal.terminal import say


def test_a_message_is_one_line_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A phase's name may contain anything, such as a terminal's codes."""
    say("the peak was in 'eval\x1b[31m\nok\r'")
    assert (
        capsys.readouterr().err
        == "memlog: the peak was in 'eval\N{REPLACEMENT CHARACTER}[31m ok '\n"
    )
