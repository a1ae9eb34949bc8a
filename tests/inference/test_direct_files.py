"""Reads and writes past the page cache: whole, or an error that names the file and the place."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from inference.errors import StoreError
from inference.memory.direct import ALIGNMENT, MOST_VIEWS, Buffer, DirectFile, aligned

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request, tmp_path):
    """A folder on a filesystem that reads directly, and on one that may not."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip("there is no writable /dev/shm")
    path = SHARED_MEMORY / f"penstock-test-{os.getpid()}"
    path.mkdir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def test_a_buffer_begins_at_a_page_and_is_zeroed():
    buffer = Buffer(5000)
    assert buffer.nbytes == aligned(5000) == 2 * ALIGNMENT
    assert buffer.tensor.data_ptr() % ALIGNMENT == 0
    assert not buffer.tensor.any()
    buffer.view[7] = 9
    assert buffer.tensor[7] == 9


def test_a_buffer_outlives_its_object_while_a_tensor_looks_into_it():
    tensor = Buffer(ALIGNMENT).tensor
    tensor.fill_(3)
    assert int(tensor.sum()) == 3 * ALIGNMENT


def test_what_is_written_is_read_back(folder):
    content = os.urandom(5 * ALIGNMENT)
    buffer, other = Buffer(len(content)), Buffer(len(content))
    buffer.view[:] = content
    with DirectFile(folder / "file", create=True) as file:
        file.write(buffer.view, 2 * ALIGNMENT)
        file.sync()
        assert file.nbytes == 7 * ALIGNMENT
        file.read(other.view, 2 * ALIGNMENT)
    assert bytes(other.view) == content
    with DirectFile(folder / "file") as file:
        file.read(other.view[: 2 * ALIGNMENT], 5 * ALIGNMENT)
    assert bytes(other.view[: 2 * ALIGNMENT]) == content[3 * ALIGNMENT :]


def test_views_are_written_and_filled_one_after_the_other_however_many(folder):
    """More of them than the system takes in one call."""
    count = MOST_VIEWS + 7
    content = os.urandom(count * ALIGNMENT)
    buffer, other = Buffer(len(content)), Buffer(len(content))
    buffer.view[:] = content
    backwards = [other.view[start : start + ALIGNMENT] for start in range(0, len(content), ALIGNMENT)][::-1]
    with DirectFile(folder / "file", create=True) as file:
        file.write_from([buffer.view[:ALIGNMENT], buffer.view[ALIGNMENT:]], ALIGNMENT)
        file.read_into(backwards, ALIGNMENT)
        assert b"".join(backwards) == content
        with pytest.raises(StoreError, match=f"ends at byte {(count + 1) * ALIGNMENT}; {(count + 2) * ALIGNMENT} "):
            file.read_into(backwards, 2 * ALIGNMENT)


def test_a_file_that_ends_too_early_is_named_with_the_place(folder):
    (folder / "short").write_bytes(bytes(ALIGNMENT))
    with DirectFile(folder / "short") as file, pytest.raises(StoreError, match=rf"ends at byte {ALIGNMENT};") as found:
        file.read(Buffer(2 * ALIGNMENT).view, 0)
    assert found.value.file == str(folder / "short")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(StoreError, match="missing: cannot be opened: No such file"):
        DirectFile(tmp_path / "missing")


def test_an_error_of_the_system_names_file_and_place(tmp_path):
    (tmp_path / "folder").mkdir()
    with (
        DirectFile(tmp_path / "folder") as file,
        pytest.raises(StoreError, match=r"folder: cannot be read at byte 8192: Is a directory"),
    ):
        file.read(Buffer(ALIGNMENT).view, 8192)


def test_a_closed_file_says_so(tmp_path):
    (tmp_path / "file").write_bytes(bytes(ALIGNMENT))
    file = DirectFile(tmp_path / "file")
    file.close()
    file.close()
    with pytest.raises(StoreError, match="Bad file descriptor"):
        file.read(Buffer(ALIGNMENT).view, 0)


def test_a_write_beyond_what_may_be_written_is_named(tmp_path):
    """The system's own limit of a file's size stands for a disk that takes no more."""
    program = f"""
import resource, signal
from pathlib import Path
from inference.errors import StoreError
from inference.memory.direct import Buffer, DirectFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({ALIGNMENT}, {ALIGNMENT}))
file = DirectFile(Path({str(tmp_path / "file")!r}), create=True)
file.write(Buffer({ALIGNMENT}).view, 0)
try:
    file.write(Buffer({ALIGNMENT}).view, {ALIGNMENT})
except StoreError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f"file: cannot be written at byte {ALIGNMENT}: File too large" in done.stdout


def test_a_reservation_that_the_disk_cannot_give_tells_what_is_free(tmp_path):
    with (
        DirectFile(tmp_path / "file", create=True) as file,
        pytest.raises(StoreError, match=r"cannot be given \d+ bytes: .*(bytes are free|too large)"),
    ):
        file.reserve(2**50)


def test_reading_leaves_nothing_in_the_page_cache(folder):
    """Resident pages of the file, told by mincore through /proc: only on a real disk does the cache let go of all."""
    path = folder / "file"
    if folder.parent == SHARED_MEMORY:
        pytest.skip("a tmpfs is the page cache")
    with DirectFile(path, create=True) as file:
        if not file.direct:
            pytest.skip("this filesystem reads through the page cache")
        buffer = Buffer(64 * ALIGNMENT)
        file.write(buffer.view, 0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        file.read(buffer.view, 0)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    # Blocks of 512 bytes that came from the disk itself, though the file had just been written.
    assert after - before >= 64 * ALIGNMENT // 512
