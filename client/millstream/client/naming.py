"""Errors in the caller's words: the services name protobuf fields, the caller knows keywords."""

from __future__ import annotations

import re

from google.rpc import status_pb2

from millstream.rpc.errors import MillstreamError, from_status

_KEYWORDS = {
    "token_ids": "prompt",
    "text": "prompt",
    "chat": "messages",
    "timeout_ms": "timeout_s",
    "tools_json": "tools",
    "variables_json": "template_variables",
}
# sampling.top_p -> top_p; inputs[3].chat.messages[0].content -> messages[0].content
_PREFIX = re.compile(r"^(sampling\.|open\.|tokens\.|inputs\[\d+\]\.(chat\.)?)")
_INPUT = re.compile(r"^inputs\[\d+\]$")


def from_service(status: status_pb2.Status) -> MillstreamError:
    """The exception for a status that is about one request."""
    return in_keywords(from_status(status))


def in_keywords(error: MillstreamError) -> MillstreamError:
    """The same error; its field and message name the Python keyword. Changes it in place."""
    if error.field:
        keyword = _keyword(error.field)
        if error.message.startswith(error.field):
            error.message = keyword + error.message.removeprefix(error.field)
            error.args = (error.message,)
        error.field = keyword
    return error


def _keyword(field: str) -> str:
    name = _INPUT.sub("prompt", _PREFIX.sub("", field))
    return _KEYWORDS.get(name, name)
