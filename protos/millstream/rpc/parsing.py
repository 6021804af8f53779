"""How command lines are parsed: errors in one line, numbers in a range, defaults in --help."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

_DEFAULT = re.compile(r"\bdefault[:)]")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default that is a value, unless the text tells what happens without the flag."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_switch = action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction)
        is_told = is_switch or action.default in (None, []) or _DEFAULT.search(action.help or "")
        return action.help if is_told else super()._get_help_string(action)


def number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    """A flag's type: a number from `low` to `high`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"from {low} to {high}, not {text}")
        return value

    parse.__name__ = "number"  # argparse names it when `kind` refuses the text
    return parse
