"""The tape record: exact round trip, and refusal of records that contradict themselves."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from planning.records import gpt_like, random_dag, uniform_chain

from recals_exp.recals.record import FORMAT_VERSION, OpRecord, RecordError, TapeRecord


@pytest.mark.parametrize("seed", range(10))
def test_json_round_trip_is_exact(seed: int) -> None:
    record = random_dag(seed)
    record = replace(record, forward_cost=record.forward_cost / 3, backward_cost=0.1 + 0.2)  # not short decimals
    assert TapeRecord.from_json(record.to_json()) == record


def test_other_format_version_is_refused() -> None:
    data = json.loads(uniform_chain(2).to_json())
    data["format_version"] = FORMAT_VERSION + 1
    with pytest.raises(RecordError, match=rf"format version {FORMAT_VERSION + 1}, this recals reads {FORMAT_VERSION}"):
        TapeRecord.from_json(json.dumps(data))


def test_cache_total_counts_every_saved_value_once() -> None:
    # 64 layers save 64 outputs of 100 bytes; 63 of them twice (as result, and as the next layer's input)
    assert uniform_chain(64).cache_total_bytes == 6400


def test_every_contradiction_is_named() -> None:
    record = gpt_like(1)
    ops = list(record.ops)
    ops[1] = replace(ops[1], cost=-1.0)
    ops[2] = OpRecord("late", "", 1.0, 0, (len(record.values) - 1,), ops[2].outputs)
    values = (replace(record.values[1], producer=7), *record.values[1:])
    with pytest.raises(RecordError, match=r"contradicts itself in \d+ place") as error:
        replace(record, ops=tuple(ops), values=values, forward_events=(*record.forward_events, ("op", 10**6)))
    message = str(error.value)
    assert "negative cost -1.0" in message
    assert "before it is made" in message
    assert "names op 7 as its producer" in message
    assert "out of range" in message


def test_overhead_is_percent_of_a_step() -> None:
    record = uniform_chain(10)
    assert record.step_cost == pytest.approx(30.0)
    assert record.overhead_pct(3.0) == pytest.approx(10.0)
