"""What is wrong with a grammar, in one line; apart from the library that finds out."""

from __future__ import annotations


class GrammarError(ValueError):
    """The grammar cannot be followed; the message is the library's, in one line."""


class GrammarsFullError(GrammarError):
    """It could be followed, once there is room for it again."""


class VocabularyError(GrammarError):
    """No grammar can be followed: the model's tokenizer cannot be used."""
