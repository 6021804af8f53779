"""Whose a stream is."""

from __future__ import annotations

import random

from millstream.engine.frontend.clients import Clients, api_key


def test_streams_with_one_key_are_one_client_and_others_their_own() -> None:
    clients = Clients()
    first, second = clients.enter("secret", 1), clients.enter("secret", 2)
    other, unknown, unknown_too = (clients.enter(key, n) for key, n in [("b", 3), ("", 4), ("", 5)])
    assert first is second
    assert len({client.number for client in (first, other, unknown, unknown_too)}) == 4
    clients.leave("secret", first)
    assert clients.enter("secret", 6) is second


def test_nothing_is_kept_of_clients_that_left_and_no_key_ever() -> None:
    clients, rng = Clients(), random.Random(0)
    open_streams = []
    for number in range(500):
        if open_streams and rng.random() < 0.5:
            key, client = open_streams.pop(rng.randrange(len(open_streams)))
            clients.leave(key, client)
        key = rng.choice(["", "a-key", "b-key"])
        open_streams.append((key, clients.enter(key, number)))
    assert "key" not in repr(clients._by_key)
    for key, client in open_streams:
        clients.leave(key, client)
    assert not clients._by_key


def test_where_a_key_is_looked_for() -> None:
    assert api_key([("user-agent", "x"), ("x-api-key", "k")]) == "k"
    assert api_key([("authorization", "Bearer t")]) == "Bearer t"
    assert api_key([("authorization", "Bearer t"), ("x-api-key", "k")]) == "k"
    assert api_key([("x-api-key", ""), ("authorization", "Bearer t")]) == "Bearer t"
    assert api_key([("x-api-key-bin", b"k"), ("x-api-key", "")]) == ""
    assert api_key(None) == ""
