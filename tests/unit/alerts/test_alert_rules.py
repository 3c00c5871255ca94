"""Alert rules as text: documented rules parse, and errors point at the mistake."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memlog.alerts import Rule, parse_rule, parse_rules
from memlog.alerts.rules import GrowthPeriod
from memlog.errors import ConfigurationError

GIB = 1024**3
MIB = 1024**2


def test_every_part_of_a_rule_is_understood() -> None:
    assert parse_rule(" error: cuda0.allocated >= 90% for 5 steps") == Rule(
        text="error: cuda0.allocated >= 90% for 5 steps",
        figure="device.allocated",
        device="cuda0",
        comparison=">=",
        amount=0.9,
        share=True,
        amount_text="90%",
        hold=5,
        level="error",
    )


@pytest.mark.parametrize(
    ("text", "amount", "share"),
    [
        ("host.rss > 32 GiB", 32 * GIB, False),
        ("host.rss>32GB", 32 * GIB, False),
        ("host.rss > 512 mib", 512 * MIB, False),
        ("host.rss > 1.5 KB", 1536, False),
        ("host.rss > 100 B", 100, False),
        ("host.rss > 2 TiB", 2 * 1024 * GIB, False),
        ("host.tree > 80%", 0.8, True),
        ("host.available < 2 GiB", 2 * GIB, False),
        ("device.reserved > 70 GiB", 70 * GIB, False),
        ("device.peak <= 99.5 %", 0.995, True),
        ("device.fragmentation > 0.4", 0.4, False),
        ("mps0.fragmentation > 40%", 0.4, False),
    ],
)
def test_an_amount_is_parsed_with_its_unit(text: str, amount: float, share: bool) -> None:
    rule = parse_rule(text)
    assert (rule.amount, rule.share, rule.level, rule.hold) == (amount, share, "warning", 1)


@pytest.mark.parametrize(
    ("text", "growth", "hold"),
    [
        ("host.rss grows > 10 MiB/epoch", GrowthPeriod(1, "epoch"), 1),
        ("host.rss grows >= 1% / 2 epochs for 6 epochs", GrowthPeriod(2, "epoch"), 6),
        ("device.allocated grows > 1 MiB/step for 50 steps", GrowthPeriod(1, "step"), 50),
        ("host.tree grows > 1 GiB/100 steps", GrowthPeriod(100, "step"), 1),
    ],
)
def test_a_growth_rule_is_parsed_with_its_axis(text: str, growth: GrowthPeriod, hold: int) -> None:
    rule = parse_rule(text)
    assert (rule.growth, rule.hold) == (growth, hold)


@pytest.mark.parametrize("text", ["info: host.rss > 1 GiB", "host.rss > 1 GiB as info"])
def test_the_level_stands_before_or_after(text: str) -> None:
    assert parse_rule(text).level == "info"


@pytest.mark.parametrize(
    ("marked", "remedy"),
    [
        ("^", "the rule is empty: begin with a figure; there are host.rss, host.tree"),
        ("^rss > 1 GiB", "'rss' is not a figure: did you mean host.rss?"),
        ("^allocated > 1 GiB", "'allocated' is not a figure: did you mean device.allocated?"),
        ("^error host.rss > 80%", "put a colon behind the level, as in 'error: host.rss > 80%'"),
        ("^ERROR: host.rss > 80%", "levels are in small letters: write error"),
        ("host.rss > 80% as ^Info", "levels are in small letters: write info"),
        ("^Host.RSS > 80%", "figures are in small letters: write host.rss"),
        ("^host.ras > 32 GiB", "did you mean host.rss?"),
        ("^gpu0.allocated > 32 GiB", "or cuda0.allocated for one"),
        ("^cuda0.rss > 32 GiB", "for one device, write cuda0.allocated"),
        ("^loud: host.rss > 1 GiB", "a level is info, warning or error"),
        ("^cuda:0.allocated > 90%", "write cuda0.allocated"),
        ("error: ^cuda:1.peak > 90%", "write cuda1.peak"),
        ("^gpu:0.reserved > 90%", "write cuda0.reserved"),
        ("^cuda:0.rss > 90%", "a level is info, warning or error"),
        ("host.rss ^= 32 GiB", "write >, >=, < or <=, or 'grows >'"),
        ("host.rss >^", "write a size such as 32 GiB, or 80%"),
        ("host.rss > ^-3 GiB", "write a size such as 32 GiB, or 80%"),
        ("host.rss > ^much", "write a size such as 32 GiB, or 80%"),
        ("host.rss > 32^", "write the unit here: B, KiB, MiB, GiB or TiB, or %"),
        ("host.rss > 32 ^apples", "write the unit here"),
        ("host.rss > ^1e30 TiB", "write a smaller size"),
        ("host.rss > ^1e999 TiB", "write a smaller size"),
        ("device.allocated > ^120%", "a share is at most 100%"),
        ("device.fragmentation > ^40", "write 0.4 or 40%"),
        ("host.rss > 1 GiB ^and more", "the rule ends here"),
        ("host.rss > 1 GiB for ^0 steps", "write a whole number from 1 up"),
        ("host.rss > 1 GiB for ^1.5 steps", "write a whole number from 1 up"),
        ("host.rss > 1 GiB for ^99999999999 steps", "write a whole number from 1 up"),
        ("host.rss > 1 GiB for 5 ^minutes", "write steps"),
        ("host.rss grows > 1 MiB/epoch for 5 ^steps", "write epochs"),
        ("host.rss grows ^< 1 MiB/epoch", "after 'grows' write > or >="),
        ("host.rss grows > 1 MiB^", "write how fast: /epoch, /step or /100 steps"),
        ("host.rss grows > 1 MiB/^hour", "write epoch or step"),
        ("host.tree grows > 1 MiB/^epoch", "host.tree is not measured by epoch"),
        ("host.rss > 1 GiB as ^loud", "a level is info, warning or error"),
        ("error: host.rss > 1 GiB ^as info", "the level is given twice"),
        ("host.rss\n>\x00\ud800 ^32 GiB".replace("^", "").replace(">", ">^"), "write a size"),
    ],
)
def test_the_caret_is_under_the_mistake(marked: str, remedy: str) -> None:
    place = marked.index("^")
    with pytest.raises(ConfigurationError) as raised:
        parse_rule(marked.replace("^", "", 1))
    message, shown, caret = str(raised.value).split("\n")
    assert message.startswith("an alert rule can't be read: ")
    assert remedy in message
    assert len(shown) == 2 + len(marked) - 1
    assert shown.isprintable()
    assert caret == " " * (2 + place) + "^"


def test_the_same_rule_twice_is_one() -> None:
    assert len(parse_rules(["host.rss > 1 GiB", "host.tree > 1%", "host.rss > 1 GiB"])) == 2


PARTS = (
    *("host.rss", "host.tree", "device.allocated", "device.fragmentation", "cuda0.peak", "grows"),
    *(">", ">=", "<", "=", "/", "%", ":", "as", "for", "error", "info", "epoch", "steps", "100"),
    *("0", "1e400", "5", "0.4", "GiB", "MB", "\u0661", "\n", "\ud800", ""),
)


@given(st.one_of(st.text(), st.lists(st.sampled_from(PARTS)).map(" ".join)))
@example("host.rss > \u0663 GiB")
@example("host.rss > 1 GiB for " + "9" * 150 + " steps")
@example("host.rss > " + "9" * 180 + " B")
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        rule = parse_rule(text)
    except ConfigurationError as error:
        assert str(error).count("\n") == 2  # noqa: PT017 - both outcomes are right, if they are whole
    else:
        assert parse_rule(rule.text) == rule
