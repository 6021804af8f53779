"""A grammar as its user wrote it, in the library's own notation."""

from __future__ import annotations

import json
import re
from typing import assert_never

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from millstream.engine.grammars.errors import GrammarError
from millstream.engine.request import GrammarKind, GrammarSpec

_MAX_MESSAGE_CHARS, _MAX_LINE = 400, 120
# A rule's attribute in Lark, which the library leaves to who samples. What else may have its text:
# comments, strings and regexes.
_TEMPERATURE = re.compile(r"\btemperature\s*=")
_NO_ATTRIBUTES = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/')


def library_grammar(spec: GrammarSpec) -> str:
    """What an LLMatcher is made of. Raises GrammarError."""
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_grammar(spec.text)
        case GrammarKind.JSON_OBJECT:
            return _json_grammar('{"type": "object"}')
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(spec.text)
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_regex("|".join(map(_as_regex, json.loads(spec.text))))
        case GrammarKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_lark(spec.text))
        case _:
            assert_never(spec.kind)


def _as_regex(text: str) -> str:
    """A regex that matches this text alone."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _json_grammar(schema: str) -> str:
    try:
        # A schema's own "x-guidance" may allow whitespace, but not that keywords are ignored.
        return LLMatcher.grammar_from_json_schema(
            schema, defaults={"whitespace_flexible": False}, overrides={"lenient": False}
        )
    except ValueError as error:
        raise GrammarError(one_line(str(error))) from error


def _lark(text: str) -> str:
    """The grammar in Lark's notation; GBNF (llama.cpp's and vLLM's) is turned into it."""
    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # its parser raises whatever comes, RecursionError too
        raise GrammarError(one_line(str(error) or type(error).__name__)) from error
    if _TEMPERATURE.search(_NO_ATTRIBUTES.sub(" ", lark)):
        raise GrammarError("temperature=: not supported; the whole request has one temperature")
    return lark


def one_line(message: str) -> str:
    """The library's message without what it quotes of a long grammar, and without its carets."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    kept = (line for line in lines if line.strip("^ "))
    text = " ".join(line if len(line) <= _MAX_LINE else line[:_MAX_LINE] + "..." for line in kept)
    return text[:_MAX_MESSAGE_CHARS]
