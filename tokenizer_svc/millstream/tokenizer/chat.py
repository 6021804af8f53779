"""Chats into text by the model's chat template, byte for byte as transformers renders them.

Special tokens' texts inside a message work as those tokens, as in transformers, unless
`plain_content` asks for segments: then the caller knows which text came from the messages.
"""

from __future__ import annotations

import inspect
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from millstream.rpc.errors import InvalidArgument, NoChatTemplate
from millstream.v1 import tokenizer_pb2

# Variables of apply_chat_template that are the template's own business, so a request may set them.
_TEMPLATE_PARAMETERS = frozenset({"documents", "kwargs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a rendered chat: a message's content, or the template's text around it."""

    text: str
    is_content: bool


class ChatRenderer:
    """Renders chats with one tokenizer's chat templates. Safe to use from many threads."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a transformers tokenizer."""
        self._tokenizer = tokenizer
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = (frozenset(parameters) - _TEMPLATE_PARAMETERS) | {"messages", "self"}

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def render(self, chat: tokenizer_pb2.Chat, *, field: str) -> str:
        """The chat's text. `field` is the chat's path in the request, for errors.

        Raises NoChatTemplate, and InvalidArgument with the template's own message.
        """
        return self._apply(chat, _messages(chat, field), field)

    def render_segments(self, chat: tokenizer_pb2.Chat, *, field: str) -> list[Segment]:
        """As `render`, in segments; a content that the template alters comes unaltered.

        Only the space around a content is the template's to trim.
        """
        # The template gets a number nobody can guess in the place of each content.
        key = f"{secrets.randbits(128):039d}"
        messages = _messages(chat, field)
        contents: list[str] = []
        for index, message in enumerate(messages):
            if message["content"] != chat.messages[index].content:
                path = f"{field}.messages[{index}].extra_json"
                raise InvalidArgument(f"{path}: no content beside plain_content", field=path)
            content = message["content"].strip()
            if content:
                message["content"] = message["content"].replace(
                    content, f"{key}{len(contents):08d}", 1
                )
                contents.append(content)
        pieces = re.split(rf"{key}(\d{{8}})", self._apply(chat, messages, field))
        return [
            Segment(text=contents[int(piece)] if odd else piece, is_content=bool(odd))
            for odd, piece in ((position % 2, piece) for position, piece in enumerate(pieces))
        ]

    def _apply(self, chat: tokenizer_pb2.Chat, messages: list[dict[str, Any]], field: str) -> str:
        template = self._template_name(chat, field)
        add_generation_prompt = (
            chat.add_generation_prompt
            if chat.HasField("add_generation_prompt")
            else not chat.continue_final_message
        )
        if add_generation_prompt and chat.continue_final_message:
            path = f"{field}.add_generation_prompt"
            raise InvalidArgument(f"{path}: not with continue_final_message", field=path)
        tools = _tools(chat.tools_json, f"{field}.tools_json")
        variables = _parse(chat.variables_json or "{}", dict, f"{field}.variables_json")
        if taken := sorted(self._reserved & variables.keys()):
            path = f"{field}.variables_json"
            raise InvalidArgument(f"{path}: {taken[0]!r} is not a free name", field=path)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=chat.continue_final_message,
                    tokenize=False,
                    **variables,
                )
            )
        except Exception as error:  # the model's template, run on the request's values: its fault
            raise InvalidArgument(
                f"{field}: the chat template says: {error}", field=field
            ) from error

    def _template_name(self, chat: tokenizer_pb2.Chat, field: str) -> str | None:
        """The name to hand to transformers, which would take an unknown one for a template."""
        templates = self._tokenizer.chat_template
        if not templates:
            raise NoChatTemplate("the model has no chat template")
        names = sorted(templates) if isinstance(templates, dict) else ["default"]
        if not chat.template:
            tool_use = bool(chat.tools_json) and "tool_use" in names
            if "default" not in names and not tool_use:
                raise NoChatTemplate(f"the model has no default chat template, only {names}")
            return None
        if chat.template not in names:
            path = f"{field}.template"
            raise InvalidArgument(f"{path}: no {chat.template!r}, only {names}", field=path)
        return chat.template if isinstance(templates, dict) else None


def _messages(chat: tokenizer_pb2.Chat, field: str) -> list[dict[str, Any]]:
    if not chat.messages:
        path = f"{field}.messages"
        raise InvalidArgument(f"{path}: at least one is needed", field=path)
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(chat.messages):
        path = f"{field}.messages[{index}].extra_json"
        extra = _parse(message.extra_json or "{}", dict, path)
        if "role" in extra:
            raise InvalidArgument(f"{path}: 'role' has a field of its own", field=path)
        messages.append({"role": message.role, "content": message.content, **extra})
    return messages


def _tools(text: str, path: str) -> list[dict[str, Any]] | None:
    if not text:
        return None
    tools: list[dict[str, Any]] = _parse(text, list, path)
    if not all(isinstance(tool, dict) for tool in tools):
        raise InvalidArgument(f"{path}: an array of objects is wanted", field=path)
    return tools


def _parse(text: str, kind: type[list[Any]] | type[dict[str, Any]], path: str) -> Any:
    wanted = "an array" if kind is list else "an object"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path}: not JSON: {error}", field=path) from None
    if not isinstance(value, kind):
        raise InvalidArgument(f"{path}: {wanted} is wanted", field=path)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            wanted = "no lone surrogates, which no text can have"
            raise InvalidArgument(f"{path}: {wanted}", field=path) from None
    return value
