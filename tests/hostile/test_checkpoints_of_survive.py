"""Checkpoints that are torn, that somebody else wrote, and that writers left half done."""

import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.support import zygote

torch = pytest.importorskip("torch")

from ringside.survive.state.checkpoint import Checkpoints, read  # noqa: E402

RUN = []


def tree(step):
    matrix = torch.arange(12.0).reshape(3, 4)
    kinds = {"b": torch.tensor([True]), "h": torch.ones(2, dtype=torch.bfloat16), "e": torch.empty(0, 2)}
    model = {"w": matrix.t() + step, "s": torch.tensor(3), **kinds}
    return {"model": model, "optimizer": {"x": [1, None]}, "step": step}


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def data_of(path):
    (found,) = path.glob("*.distcp")
    return found


def tear(path):
    data_of(path).write_bytes(data_of(path).read_bytes()[:500])


def say_digests(path):
    """Have a checkpoint say the digests of what lies there now, as whoever writes there can."""
    about = json.loads((path / "ringside.json").read_text())
    for file in path.iterdir():
        if file.name in about.get("files", {}) and file.is_file():
            about["files"][file.name] = hashlib.blake2b(file.read_bytes()).hexdigest()
    (path / "ringside.json").write_text(json.dumps(about))


def test_a_torn_newest_one_is_set_aside_and_written_anew(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path)
    for step in (100, 120):
        checkpoints.write(tree(step))
    tear(tmp_path / "step-00000120")
    assert checkpoints.newest()["step"] == 100
    checkpoints.write(tree(120))
    assert checkpoints.newest()["step"] == 120
    assert names(tmp_path) == ["step-00000100", "step-00000120", "torn-step-00000120"]
    assert "was torn" in caplog.text
    checkpoints.write(tree(140))
    checkpoints.write(tree(160))
    assert names(tmp_path) == ["step-00000140", "step-00000160"]


def test_a_torn_one_does_not_count_as_kept(tmp_path):
    Checkpoints(tmp_path).write(tree(100))
    Checkpoints(tmp_path).write(tree(120))
    tear(tmp_path / "step-00000120")
    again = Checkpoints(tmp_path)
    assert again.newest()["step"] == 100
    again.write(tree(140))
    tear(tmp_path / "step-00000140")
    assert Checkpoints(tmp_path).newest()["step"] == 100


def test_what_is_written_is_this_state_and_not_another_of_the_same_step(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(tree(5))
    other = tree(5)
    other["model"]["w"] = other["model"]["w"] + 1
    checkpoints.write(other)
    assert torch.equal(checkpoints.newest()["model"]["w"], other["model"]["w"])


class Runs:
    """Asks for code when it is unpickled."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def in_metadata(path, hostile):
    (path / ".metadata").write_bytes(pickle.dumps(hostile))


def around_metadata(path, hostile):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = hostile
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def in_tensor(path, hostile, compression=zipfile.ZIP_STORED):
    """Put a pickle where the first tensor's is, in a data file that has nothing else."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as archive:
        archive.writestr("archive/data.pkl", hostile if isinstance(hostile, bytes) else pickle.dumps(hostile))
        archive.writestr("archive/data/0", bytes(64))
        archive.writestr("archive/byteorder", sys.byteorder)
    first = next(iter(metadata.storage_data.values()))
    first.offset, first.length = data_of(path).stat().st_size, len(data.getvalue())
    data_of(path).write_bytes(data_of(path).read_bytes() + data.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("place", [in_metadata, around_metadata, in_tensor])
@pytest.mark.parametrize("call", [os.system, exec, torch.load, getattr, torch.hub.load])
def test_nothing_that_lies_there_is_run_though_its_digests_are_right(tmp_path, place, call, caplog):
    checkpoints = Checkpoints(tmp_path / "new")
    checkpoints.write(tree(1))
    path = checkpoints.write(tree(2))
    mark = tmp_path / "run"
    code = {os.system: f"touch {mark}", exec: f"open({str(mark)!r}, 'w')"}.get(call, str(mark))
    place(path, Runs(call, code))
    say_digests(path)
    assert checkpoints.newest()["step"] == 1
    assert not mark.exists()
    assert "refused: it asks for" in caplog.text


def test_files_are_compared_before_anything_of_them_is_read(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path)
    in_metadata(checkpoints.write(tree(2)), Runs(RUN.append, 1))
    assert checkpoints.newest() is None
    assert ".metadata is not what was written" in caplog.text


class Placed(pickle.Pickler):
    """Pickles a tensor as torch.save does, its memory in another file."""

    def persistent_id(self, each):
        return ("storage", torch.FloatStorage, "0", "cpu", 16) if each is RUN else None


def in_place(first, shape, strides):
    """Return what makes the first tensor another view of its 16 elements."""

    def put(path):
        made = Runs(torch._utils._rebuild_tensor_v2, RUN, first, shape, strides, False, {})
        data = io.BytesIO()
        Placed(data, protocol=2).dump(made)
        in_tensor(path, data.getvalue())

    return put


WRONG = {
    "a pipe": lambda path: (os.unlink(path / ".metadata"), os.mkfifo(path / ".metadata")),
    "a link": lambda path: (data_of(path).rename(path.parent / "x"), (path / "__0_0.distcp").symlink_to("../x")),
    "a device": lambda path: ((path / ".metadata").unlink(), (path / ".metadata").symlink_to("/dev/zero")),
    "no metadata": lambda path: (path / ".metadata").unlink(),
    "before its memory": in_place(-1, (4, 4), (4, 1)),
    "behind its memory": in_place(1, (4, 4), (4, 1)),
    "larger than its memory": in_place(0, (1 << 40,), (0,)),
    "backward": in_place(15, (4,), (-1,)),
    "no shape": in_place(0, (2.5,), (1,)),
    "another view": in_place(0, (2, 2), (4, 1)),
    "gigabytes by a number": lambda path: (path / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f."),
    "compressed": lambda path: in_tensor(path, None, zipfile.ZIP_DEFLATED),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_file_of_ours_is_passed_over(tmp_path, wrong):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(tree(1))
    WRONG[wrong](checkpoints.write(tree(2)))
    say_digests(tmp_path / "step-00000002")
    assert checkpoints.newest()["step"] == 1


def test_one_that_was_written_without_digests_of_files_is_read(tmp_path):
    path = Checkpoints(tmp_path).write(tree(2))
    about = json.loads((path / "ringside.json").read_text())
    about.pop("files")
    (path / "ringside.json").write_text(json.dumps(about))
    assert torch.equal(read(path)["model"]["w"], tree(2)["model"]["w"])


def test_what_a_writer_that_was_killed_left_is_removed_by_the_next(tmp_path):
    script = Path(__file__).parent / "scripts" / "killed_writer.py"
    killed = subprocess.run([zygote.python(), script, tmp_path], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 1
    Checkpoints(tmp_path).write(tree(8))
    assert names(tmp_path) == ["step-00000008"]


def mark_of_this_process(directory):
    """Return machine, process and start as they stand in the name under which a writer writes."""
    made, mkdir = [], Path.mkdir

    def noted(path, *args, **how):
        made.append(path.name)
        mkdir(path, *args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", noted)
        Checkpoints(directory).write(tree(1))
    (name,) = {name for name in made if name.startswith(".step-")}
    machine, pid, started, _ = name.removeprefix(".step-00000001-").split("-")
    return machine, int(pid), int(started)


def test_only_what_dead_writers_left_is_removed(tmp_path):
    checkpoints, hour = Checkpoints(tmp_path), 3600.0
    here, pid, started = mark_of_this_process(tmp_path / "before")
    assert pid == os.getpid()
    other = "0123abcd"
    stays = [
        f".step-00000001-{here}-{pid}-{started}-00000001",  # this process lives
        f".step-00000001-{other}-{os.getpid()}-{started + 1}-00000001",  # on another host, and writing
        ".step-00000001-4711",  # of an older version, and writing
        ".other",
    ]
    goes = [
        f".step-00000001-{here}-{os.getpid()}-{started + 1}-00000001",  # its number was given to this process
        f".step-00000001-{other}-{os.getpid()}-{started}-00000002",
        ".step-00000001-4712",
        ".gone-0123",
    ]
    shutil.rmtree(tmp_path / "before")
    for name in (*stays, *goes):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(b"x")
    for name in goes[1:]:
        for path in (tmp_path / name / "data", tmp_path / name):
            past = path.stat().st_mtime - 2 * hour
            os.utime(path, (past, past))
    checkpoints.write(tree(8))
    assert names(tmp_path) == sorted([*stays, "step-00000008"])


def test_a_writer_that_was_taken_for_dead_puts_nothing_half_done_in_place(tmp_path, monkeypatch):
    checkpoints, rename = Checkpoints(tmp_path), Path.rename

    def removed_meanwhile(path, target):
        if path.name.startswith(".step-"):
            os.rename(path, tmp_path / ".gone")  # as another writer removes it
            shutil.rmtree(tmp_path / ".gone")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", removed_meanwhile)
    with pytest.raises(FileNotFoundError):
        checkpoints.write(tree(3))
    assert names(tmp_path) == []
