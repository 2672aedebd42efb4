from __future__ import annotations

import zmq

from toka_async.nodes.keys import derive_keys, draw_keys


def test_all_who_know_the_secret_have_the_same_pair() -> None:
    keys = derive_keys("secret")
    assert keys == derive_keys("secret") != derive_keys("Secret")
    assert zmq.curve_public(keys.secret.encode()).decode() == keys.public


def test_every_life_has_its_own_pair() -> None:
    assert draw_keys() != draw_keys()
