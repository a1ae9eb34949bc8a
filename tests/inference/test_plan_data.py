"""Plans as data."""

import json
from pathlib import Path

import pytest

from inference.bench.offload import read_plan
from inference.errors import StoreError
from inference.memory.placement import Placement
from inference.planner.plan import Neighbour, Plan, Predicted
from inference.planner.workload import Lengths, Workload


def _plan() -> Plan:
    predicted = Predicted(
        prefill_tokens_per_s=800.0,
        decode_tokens_per_s=90.0,
        output_tokens_per_s=70.0,
        seconds=100.0,
        prefill_seconds=20.0,
        decode_seconds=80.0,
        step_seconds=1.5,
        longest_step_seconds=2.0,
        steps=70,
        peak_memory_bytes={"host": 3_000_000_000, "disk": 5_000_000_000},
        streamed_bytes_per_step=2_000_000_000,
        bound_by="disk",
    )
    return Plan(
        placement=Placement(pinned=frozenset({3, 1}), ring=3, readers=2, spilled=frozenset({0})),
        compute="int8",
        cache="int8",
        cache_pages=512,
        max_batch=64,
        token_budget=512,
        memory_bytes=3_000_000_000,
        workload=Workload(1000, Lengths(100.5, 200), Lengths.all(64)),
        predicted=predicted,
        hardware={"disk_bytes_per_s": 1.2e9},
        neighbours=(Neighbour("twice the batch", None, "does not fit"),),
    )


def test_a_plan_is_the_same_after_a_way_through_json() -> None:
    plan = _plan()
    assert Plan.from_dict(json.loads(plan.to_json())) == plan


def test_a_plan_made_for_no_workload_is_the_same_after_a_way_through_json() -> None:
    plan = Plan(Placement.resident(4), "int8", "int8", 10, 8, 512, 1000)
    assert Plan.from_dict(json.loads(plan.to_json())) == plan


def test_lengths_of_a_list_are_its_mean_and_its_largest() -> None:
    assert Lengths.of([10, 20, 60]) == Lengths(30.0, 60)
    assert Workload(5, Lengths.of([10, 20, 60]), Lengths.all(7)).context == 67


def test_lengths_that_no_rows_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="largest"):
        Lengths(30.0, 20)
    with pytest.raises(ValueError, match="empty"):
        Lengths.of([])
    with pytest.raises(ValueError, match="rows"):
        Workload.uniform(0, 10, 10)


JUNK = [
    None,
    True,
    -1,
    2**70,
    1.5,
    float("inf"),
    float("nan"),
    "",
    "int3",
    [],
    {},
    [-1],
    ["0"],
    [True],
    [[0]],
    {"a": 1},
]


@pytest.mark.parametrize("part", ["placement", None])
def test_a_plan_of_junk_is_told_as_one_and_a_file_of_it_by_its_name(part: str | None, tmp_path: Path) -> None:
    whole = Plan(Placement(frozenset({0}), ring=2, readers=1), "int8", "int8", 10, 8, 512, 1000).as_dict()
    harmless = {"hardware", "neighbours", "workload", "predicted"}  # notes, which nobody computes with
    for field in set(whole if part is None else whole[part]) - harmless:
        for junk in JUNK:
            lying = json.loads(json.dumps(whole))
            (lying if part is None else lying[part])[field] = junk
            file = tmp_path / "plan.json"
            file.write_text(json.dumps(lying), "utf-8")
            try:
                plan = read_plan(file)
            except StoreError as error:
                assert error.file == str(file)
            else:  # no layers, or a flag
                assert Plan.from_dict(json.loads(plan.to_json())) == plan
                assert not junk or junk is True, (field, junk)
