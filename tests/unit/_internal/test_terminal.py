"""Messages on the standard streams."""

import pytest

from memlog import console
from memlog._internal.diagnostics import warn
from memlog._internal.terminal import out, say
from memlog.events import Alert, Recorded


def test_a_message_is_one_line_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A phase's name may contain anything, such as a terminal's codes."""
    say("the peak was in 'eval\x1b[31m\nok\r'")
    assert (
        capsys.readouterr().err
        == "memlog: the peak was in 'eval\N{REPLACEMENT CHARACTER}[31m ok '\n"
    )


CONTROLS = "\x1b]0;title\x07\x9b2J\x08\u202e\r"


def test_no_label_of_a_monitor_or_name_in_an_alert_controls_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    label = f"a{CONTROLS}\nb"
    event = Recorded(1, label, rss=3)
    texts = [
        console.point_line(event),
        console.summary_lines([event]),
        console.profile_lines([event, event]),
        console.alert_line(Alert(1, 2, "warning", "host.rss > 1", label, label)),
    ]
    console.ProgressLine(label).close(1, 1, None)
    out(f"layer {label}")
    texts += [*capsys.readouterr()]
    assert all(char.isprintable() or char == "\n" for text in texts for char in text)


def test_a_warning_is_one_line_without_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    warn(f"memlog: {CONTROLS} is left out")
    assert caplog.messages[0].isprintable()
