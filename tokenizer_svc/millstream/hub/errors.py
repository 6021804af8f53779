"""What can go wrong on the way to a model's folder; each message is one line made for people."""

from __future__ import annotations


class HubError(Exception):
    """A model cannot be had."""


class ModelNotFound(HubError):
    """There is no such model, or it cannot be reached from here."""


class FetchError(ModelNotFound):
    """The default model cannot be obtained or converted."""


class GgufError(HubError):
    """The file is no GGUF file, or describes a model that cannot be imported faithfully."""
