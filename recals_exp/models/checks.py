"""Checks that model builders share: a wrong size is refused by name before torch meets it."""

from __future__ import annotations

from recals_exp.runconfig import ConfigError


def check_whole(**sizes: object) -> None:
    """Every keyword must be a whole number of at least 1."""
    wrong = [
        f"{name}={value!r}"
        for name, value in sizes.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: not allowed, use whole numbers of at least 1")


def check_probability(**values: object) -> None:
    """Every keyword must be a number in [0, 1)."""
    wrong = [
        f"{name}={value!r}"
        for name, value in values.items()
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1
    ]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: not allowed, use a probability of at least 0 and below 1")
