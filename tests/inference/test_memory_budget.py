"""Sizes that people write, and the limits of control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.memory.budget import SizeError, group_left_bytes, group_limit_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3GB", 3_000_000_000),
        ("2GiB", 2_147_483_648),
        ("2.5 gib", 2_684_354_560),
        ("3G", 3_221_225_472),
        ("512MB", 512_000_000),
        ("1024", 1024),
        (" 7 kB ", 7000),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "3 apples", "-1GB", "1e9", "3GB4", "0", "0.1", "nan", "9" * 400 + "GB"])
def test_what_is_no_size_is_told_what_one_looks_like(text: str) -> None:
    with pytest.raises(SizeError, match="size"):
        parse_size(text)


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)


def test_the_tightest_group_of_version_2_on_the_way_up_decides_and_page_cache_is_free(tmp_path: Path) -> None:
    process, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(process, {"cgroup": "0::/service/worker\n"})
    write(groups, {})
    own = {
        "memory.max": "4000\n",
        "memory.current": "1500\n",
        "memory.stat": "anon 900\ninactive_file 400\nactive_file 100\n",
    }
    write(groups / "service" / "worker", own)
    assert group_left_bytes(process, groups) == 4000 - (1500 - 500)
    above = {"memory.max": "2000\n", "memory.current": "1800\n", "memory.stat": "inactive_file 100\nactive_file 0\n"}
    write(groups / "service", above)
    assert group_left_bytes(process, groups) == 2000 - 1700
    assert group_limit_bytes(process, groups) == 2000
    write(groups / "service", {"memory.max": "max\n"})
    assert group_limit_bytes(process, groups) == 4000


def test_where_a_group_is_slowed_down_counts_as_its_limit(tmp_path: Path) -> None:
    process, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(process, {"cgroup": "0::/worker\n"})
    own = {"memory.max": "max\n", "memory.high": "3000\n", "memory.current": "1000\n", "memory.stat": "anon 900\n"}
    write(groups / "worker", own)
    assert group_limit_bytes(process, groups) == 3000
    assert group_left_bytes(process, groups) == 2000
    write(groups / "worker", {"memory.max": "2500\n", "memory.high": "max\n"})
    assert group_limit_bytes(process, groups) == 2500
    write(groups / "worker", {"memory.max": "nonsense\n", "memory.high": "\n"})
    assert group_limit_bytes(process, groups) is None


def test_groups_of_version_1_are_read_and_no_limit_is_none(tmp_path: Path) -> None:
    process, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(process, {"cgroup": "12:cpu,cpuacct:/x\n9:memory:/capped.7\n0::/\n"})
    root = {
        "memory.limit_in_bytes": "9223372036854771712\n",
        "memory.usage_in_bytes": "5\n",
        "memory.stat": "cache 0\n",
    }
    write(groups / "memory", root)
    assert group_left_bytes(process, groups) is None
    capped = {
        "memory.limit_in_bytes": "3000\n",
        "memory.usage_in_bytes": "2500\n",
        # Those without total_ leave out the groups below.
        "memory.stat": "inactive_file 1\nactive_file 1\ntotal_inactive_file 1000\ntotal_active_file 300\n",
    }
    write(groups / "memory" / "capped.7", capped)
    assert group_left_bytes(process, groups) == 3000 - 1200
    # In a container the group's path may not be shown; its own root is then what limits it.
    write(process, {"cgroup": "9:memory:/docker/abc\n"})
    write(groups / "memory", {"memory.limit_in_bytes": "1000\n", "memory.usage_in_bytes": "1200\n"})
    assert group_left_bytes(process, groups) == 0


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert group_left_bytes(tmp_path / "nothing", tmp_path / "nowhere") is None
