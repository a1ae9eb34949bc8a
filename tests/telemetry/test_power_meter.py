"""Energy counters, on a powercap tree of our own making."""

import datetime as dt
from decimal import Decimal
from pathlib import Path

import pytest

from penstock.telemetry.energy import NoMeter, RaplMeter, readable_counters

RANGE = 262_143_328_850


def zone(root: Path, folder: str, name: str, microjoules: int = 0) -> Path:
    path = root / folder
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    return path / "energy_uj"


def moment(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, tz=dt.UTC)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_packages_and_memory_count_but_not_their_parts(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0")
    zone(tmp_path, "intel-rapl:0:0", "core")
    zone(tmp_path, "intel-rapl:0:1", "dram")
    zone(tmp_path, "intel-rapl:1", "psys")
    assert [counter.path.parent.name for counter in readable_counters(tmp_path)] == ["intel-rapl:0", "intel-rapl:0:1"]


def test_a_host_without_counters_has_none(tmp_path: Path) -> None:
    assert readable_counters(tmp_path / "missing") == []
    zone(tmp_path, "intel-rapl:0:1", "dram")
    assert readable_counters(tmp_path) == []
    assert NoMeter().mean_watts(moment(0), moment(1)) is None


def test_mean_power_is_joules_over_seconds(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    clock = Clock()
    meter = RaplMeter(readable_counters(tmp_path), clock)
    for second, microjoules in ((1001.0, 55_000_000), (1002.0, 155_000_000)):
        clock.now = second
        package.write_text(str(microjoules))
        meter.sample()
    assert meter.mean_watts(moment(1000), moment(1002)) == Decimal("75.0")  # 150 J in 2 s
    assert meter.mean_watts(moment(1001), moment(1002)) == Decimal("100.0")


def test_a_counter_that_wraps_around_is_put_right(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", RANGE - 10_000_000)
    clock = Clock()
    meter = RaplMeter(readable_counters(tmp_path), clock)
    clock.now = 1001.0
    package.write_text("20000000")
    assert meter.mean_watts(moment(1000), moment(1001)) == Decimal("30.0")


@pytest.mark.parametrize("start", [999.0, 0.0])
def test_a_spell_that_began_before_the_meter_is_not_measured(tmp_path: Path, start: float) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0")
    clock = Clock()
    meter = RaplMeter(readable_counters(tmp_path), clock)
    clock.now = 1010.0
    assert meter.mean_watts(moment(start), moment(1010)) is None


def test_counters_that_vanish_cost_a_figure_and_no_result(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0")
    clock = Clock()
    meter = RaplMeter(readable_counters(tmp_path), clock)
    clock.now = 1001.0
    package.unlink()
    assert meter.mean_watts(moment(1000), moment(1001)) is None
