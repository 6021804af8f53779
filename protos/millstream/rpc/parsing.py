"""How command lines are parsed: errors in one line, numbers in a range, defaults in --help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default, unless the text tells what happens without the flag."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unset = action.default is None or "default:" in (action.help or "")
        return action.help if unset else super()._get_help_string(action)


def number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    """A flag's type: a number from `low` to `high`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"from {low} to {high}, not {text}")
        return value

    parse.__name__ = "number"  # argparse names it when `kind` refuses the text
    return parse
