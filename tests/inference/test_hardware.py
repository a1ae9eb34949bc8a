"""What a host is measured to be."""

import json
from pathlib import Path

import pytest

from inference.__main__ import main
from inference.errors import StoreError
from inference.hardware_command import size
from inference.planner import disk as disk_module
from inference.planner import hardware as hardware_module
from inference.planner import measured as measured_module
from inference.planner import peaks as peaks_module
from inference.planner.disk import TrialFile, disk_rate
from inference.planner.measured import sampled


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measures little, and keeps it here."""
    monkeypatch.setattr(measured_module, "measured_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(peaks_module, "SECONDS_A_RATE", 0.0)
    monkeypatch.setattr(hardware_module, "ROWS", (1, 4))
    monkeypatch.setattr(hardware_module, "WIDTH", 256)
    monkeypatch.setattr(hardware_module, "READ_BYTES", 2**20)
    monkeypatch.setattr(hardware_module, "COPY_BYTES", 2**20)
    monkeypatch.setattr(disk_module, "FILE_BYTES", 8 * 2**20)
    monkeypatch.setattr(disk_module, "LEAST_SECONDS", 0.05)
    return tmp_path


def test_hardware_is_measured_once_and_anew_where_that_is_asked_for(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["hardware", "--folder", str(quick / "images"), "--threads", "1", "--json"]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    assert list((quick / "images").iterdir()) == []  # the trial file is gone
    assert first["disk"]["bytes_per_s"] > 0 and first["rates"]["read_bytes_per_s"] > 0
    kernels = {(rate["kernel"], rate["rows"]) for rate in first["rates"]["arithmetic"]}
    assert kernels == {(name, rows) for name in ("int8", "int8, 4-bit weights", "bf16", "fp32") for rows in (1, 4)}
    assert main(command) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["rates"] == first["rates"] and second["disk"] == first["disk"]
    assert main([*command, "--measure-again"]) == 0
    assert json.loads(capsys.readouterr().out)["rates"]["read_bytes_per_s"] != first["rates"]["read_bytes_per_s"]


def test_hardware_is_told_in_words_with_what_was_written(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "--folder", str(quick / "images"), "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert f"a file of 8.39 MB is written in {quick / 'images'}, read and removed" in err
    assert "by 4 readers, 4.19 MB at a time" in out and "control group" in out and "int8, 4-bit weights" in out


def test_a_disk_without_room_is_not_filled(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "LEAST_FREE", 2**60)
    with pytest.raises(StoreError, match="free; measuring the disk wants"):
        disk_rate(quick / "images")
    assert list((quick / "images").iterdir()) == []


def test_the_trial_file_is_removed_though_measuring_fails(quick: Path) -> None:
    with pytest.raises(RuntimeError), TrialFile(quick / "images") as trial:
        assert len(list((quick / "images").iterdir())) == 1
        assert trial.read_for(0.01, 2) > 0
        raise RuntimeError
    assert list((quick / "images").iterdir()) == []


def test_sizes_are_written_for_people() -> None:
    assert [size(n) for n in (12, 4_194_304, 1.5e9, 2.56e13)] == ["12 B", "4.19 MB", "1.5 GB", "25.6 TB"]


def test_rates_are_the_mean_of_samples_that_are_not_too_old(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, other = quick / "kept" / "rates.json", quick / "kept" / "other.json"
    clock = [1000.0]
    monkeypatch.setattr(measured_module.time, "time", lambda: clock[0])
    measured: list[dict[str, object]] = [
        {"seconds": [1.0, 2.0], "rows": [1, 8], "rate": None, "at": "one"},
        {"seconds": [3.0, 6.0], "rows": [1, 8], "rate": 4.0, "at": "two"},
        {"seconds": [5.0, 7.0], "rows": [1, 8], "rate": 6.0, "at": "three"},
    ]
    coming = iter(measured)
    sound = [True]

    def found(after: float, *, again: bool = False) -> dict[str, object]:
        clock[0] += after
        return sampled(place, lambda: (next(coming), sound[0]), again=again)

    assert found(0) == found(measured_module.FRESH_SECONDS) == measured[0]
    assert found(1) == {"seconds": [2.0, 4.0], "rows": [1, 8], "rate": 4.0, "at": "two"}
    assert found(measured_module.SAMPLES_SECONDS) == {"seconds": [4.0, 6.5], "rows": [1, 8], "rate": 5.0, "at": "three"}
    # Where one measurement a host is enough, all that was kept will do, and nothing is measured.
    clock[0] += 10 * measured_module.SAMPLES_SECONDS
    assert sampled(place, lambda: pytest.fail("measured again"), once=True)["rate"] == 5.0
    assert sampled(other, lambda: (measured[0], True), once=True) == measured[0]
    # What is measured while others compute counts only where there is nothing else.
    coming = iter(measured)
    sound[0] = False
    assert found(0, again=True) == measured[0]
    sound[0] = True
    assert found(measured_module.FRESH_SECONDS + 1) == measured[1]
    sound[0] = False
    assert found(measured_module.FRESH_SECONDS + 1) == measured[1]
