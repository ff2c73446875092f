"""Signed messages: good once, from whom they should be, for a while."""

from __future__ import annotations

import pytest

from atoll.signature import WINDOW_S, SignatureError, Verifier, sign

SECRET = b"s" * 32
BODY = b'{"type":"events"}'


def test_a_good_message_is_taken_once() -> None:
    verifier = Verifier(SECRET, lambda: 1000.0)
    signature = sign(SECRET, BODY, 1000.0)
    verifier.check(signature, BODY)
    with pytest.raises(SignatureError, match="already received"):
        verifier.check(signature, BODY)
    verifier.check(sign(SECRET, BODY, 1000.0), BODY)


@pytest.mark.parametrize("moment", [1000.0 - WINDOW_S - 1, 1000.0 + WINDOW_S + 1])
def test_a_message_of_another_time_is_refused(moment: float) -> None:
    with pytest.raises(SignatureError, match="too old"):
        Verifier(SECRET, lambda: 1000.0).check(sign(SECRET, BODY, moment), BODY)


def test_what_was_seen_is_remembered_for_as_long_as_it_would_be_good() -> None:
    now = 1000.0
    verifier = Verifier(SECRET, lambda: now)
    signature = sign(SECRET, BODY, 1000.0)
    verifier.check(signature, BODY)
    now = 1000.0 + WINDOW_S
    with pytest.raises(SignatureError, match="already received"):
        verifier.check(signature, BODY)
    now += 1
    with pytest.raises(SignatureError, match="too old"):
        verifier.check(signature, BODY)
    verifier.check(sign(SECRET, BODY, now), BODY)
    assert len(verifier._seen) == 1


def test_every_part_is_signed() -> None:
    verifier = Verifier(SECRET, lambda: 1000.0)
    signature = sign(SECRET, BODY, 1000.0)
    moment, id, mark = (part.partition("=")[2] for part in signature.split(","))
    for forged in (
        "",
        "nonsense",
        sign(b"other" * 8, BODY, 1000.0),
        f"t=1001,id={id},v1={mark}",
        f"t={moment},id={'0' * 32},v1={mark}",
        f"t={moment},id={id},v1={'0' * 64}",
        f"t={moment},id={id},v1=",
        f"{signature}\n",
        signature.upper(),
    ):
        with pytest.raises(SignatureError, match="invalid signature"):
            verifier.check(forged, BODY)
    with pytest.raises(SignatureError, match="invalid signature"):
        verifier.check(signature, BODY + b" ")
    verifier.check(signature, BODY)
