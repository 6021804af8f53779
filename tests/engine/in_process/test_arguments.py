"""in_process/arguments.py: what a caller of LLM gives."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from millstream.engine.in_process.arguments import prompt_ids
from millstream.rpc.errors import InvalidArgument


@pytest.mark.parametrize(
    "prompt",
    [
        [0, 1, 2**32 - 1],
        (0, 1, 2**32 - 1),
        [0, np.int64(1), np.uint32(2**32 - 1)],
        array("I", [0, 1, 2**32 - 1]),
    ],
)
def test_ids_of_any_kind_become_plain_ints(prompt: Any) -> None:
    token_ids = prompt_ids(prompt)
    assert token_ids == [0, 1, 2**32 - 1]
    assert set(map(type, token_ids)) == {int}


def test_a_prompt_has_a_list_of_its_own() -> None:
    prompt = [1, 2, 3]
    token_ids = prompt_ids(prompt)
    prompt[0] = -1
    assert token_ids == [1, 2, 3]
    assert prompt_ids([]) == []  # validation refuses it


@pytest.mark.parametrize("bad", [-1, 2**32, 2**64, True, 1.0, "1", None, np.int64(-1), np.True_])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_bad_id_is_named_with_its_place(bad: Any, kind: type) -> None:
    with pytest.raises(InvalidArgument, match=r"^prompt\[2\]: a token id") as caught:
        prompt_ids(kind([5, np.int64(6), bad, None]))
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("prompt", [None, 3, {1, 2}, frozenset([1]), {1: 2}, b"ab", iter([1])])
def test_what_is_no_list_is_refused_whatever_it_holds(prompt: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^prompt: a list of token ids"):
        prompt_ids(prompt)
