"""What each field of the Tokenizer service's requests takes."""

from __future__ import annotations

from collections.abc import Mapping

from tests.field_matrix.values import Json, Rule, anything, each, within

from millstream.rpc.errors import DuplicateHandle, InvalidArgument, UnknownHandle

_CHAT = "inputs[0].chat"
_MAX_STOP_CHARS = 4096
_NESTED = "[" * 100_000
_LONE_SURROGATE = '{"content":"\\ud83d"}'


def encode_rules() -> Mapping[str, Rule]:
    chat = {
        "messages": Rule(good=bool, fields=(f"{_CHAT}.messages",)),
        "messages.role": Rule(good=anything),
        "messages.content": Rule(good=anything),
        "messages.extra_json": Rule(
            good=_is_extra,
            fields=(f"{_CHAT}.messages[0].extra_json", _CHAT),  # what the template cannot take
            more=[
                '{"name":"x"}',
                '{"role":"x"}',
                '{"content":1}',
                '{"content":null}',
                "[]",
                "NaN",
                _NESTED,
                _LONE_SURROGATE,
            ],
        ),
        "add_generation_prompt": Rule(good=anything),
        "continue_final_message": Rule(good=anything),
        "template": Rule(
            good=lambda value: value in ("", "default"), fields=(f"{_CHAT}.template",)
        ),
        "tools_json": Rule(
            good=lambda value: value in ("", "[]", '[{"type":"function"}]'),
            fields=(f"{_CHAT}.tools_json",),
            more=["[]", "{}", '[{"type":"function"}]', "[1]", '["\\ud83d"]', _NESTED],
        ),
        "variables_json": Rule(
            good=lambda value: value in ("", '{"x":1e999}'),
            fields=(f"{_CHAT}.variables_json",),
            more=['{"x":1e999}', '{"messages":[]}', '{"self":1}', "[]", _LONE_SURROGATE, _NESTED],
        ),
        "plain_content": Rule(good=anything),
    }
    return {
        "inputs": Rule(good=lambda value: value == [], fields=("inputs[0]",)),
        "inputs.text": Rule(good=anything),
        "inputs.chat": Rule(good=lambda value: value != {}, fields=(f"{_CHAT}.messages",)),
        **{f"inputs.chat.{name}": rule for name, rule in chat.items()},
        "add_special_tokens": Rule(good=anything),
    }


def decode_rules(vocab_size: int) -> Mapping[str, Rule]:
    return {
        "sequences": Rule(good=anything),
        "sequences.token_ids": Rule(
            good=each(within(0, vocab_size - 1)),
            fields=("sequences[0].token_ids",),
            more=[[vocab_size - 1], [vocab_size]],
        ),
        "skip_special_tokens": Rule(good=anything),
    }


def detokenize_rules(vocab_size: int) -> Mapping[str, Rule]:
    known = each(within(0, vocab_size - 1))
    more = [[vocab_size - 1], [vocab_size]]
    # What the engine tells of probabilities is of no use to a detokenizer, whatever it is.
    ignored = ("", ".token_logprobs", ".top_counts", ".top_token_ids", ".top_logprobs")
    return {
        "open": Rule(
            good=lambda value: len(value) <= 1, kind=DuplicateHandle, fields=("open.handle",)
        ),
        "open.handle": Rule(good=anything),
        "open.context_token_ids": Rule(good=known, more=more),
        "open.skip_special_tokens": Rule(good=anything),
        "open.stop": Rule(
            good=lambda value: "" not in value and len("".join(value)) <= _MAX_STOP_CHARS
        ),
        "open.include_stop": Rule(good=anything),
        "open.min_tokens": Rule(good=anything),
        "tokens": Rule(good=anything),
        "tokens.handles": Rule(
            good=lambda value: value == [1],
            kind=lambda value: UnknownHandle if len(value) == 1 else InvalidArgument,
            fields=("tokens.handles", "tokens.token_ids"),
        ),
        "tokens.token_ids": Rule(good=lambda value: len(value) == 1 and known(value), more=more),
        "tokens.counts": Rule(good=lambda value: value in ([], [1])),
        **{f"tokens.logprobs{name}": Rule(good=anything) for name in ignored},
        "close": Rule(good=lambda value: value in ([], [1]), kind=UnknownHandle),
    }


def _is_extra(value: Json) -> bool:
    return value in ("", '{"name":"x"}')
