from __future__ import annotations

import itertools

import pytest

from atoll.model import State
from atoll.model.state import ALIVE, LEGAL, IllegalTransitionError, is_legal, next_state

M, S, R, P, X, E = (State.MISSING, State.STARTING, State.RUNNING, State.PAUSED, State.STOPPED, State.ERROR)
EXPECTED = {(M, S), (S, R), (S, E), (S, M), (R, P), (R, X), (R, E), (R, M), (P, R), (P, X), (P, E), (P, M)}
EXPECTED |= {(X, E), (X, M), (E, R), (E, P), (E, X), (E, M)}


@pytest.mark.parametrize(("before", "after"), [*itertools.product(State, State)])
def test_every_pair_of_states_is_decided(before: State, after: State) -> None:
    assert is_legal(before, after) == ((before, after) in EXPECTED)
    if (before, after) in EXPECTED:
        assert next_state(before, after) is after
    else:
        with pytest.raises(IllegalTransitionError, match=f"from {before} to {after}"):
            next_state(before, after)


def test_the_table_has_a_row_for_every_state_and_cannot_be_changed() -> None:
    assert set(LEGAL) == set(State)
    with pytest.raises(TypeError):
        LEGAL[State.MISSING] = frozenset()  # type: ignore[index]


def test_from_every_state_a_sandbox_can_end_and_no_way_leads_around_a_start() -> None:
    for state in set(State) - {State.MISSING}:
        assert State.MISSING in LEGAL[state]
    assert LEGAL[State.MISSING] == {State.STARTING}
    assert State.STOPPED not in ALIVE
