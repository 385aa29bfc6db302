from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from ringside.doctor import Findings, Limits, examine, gather
from ringside.text import natural_key

from .dumps import call, world, write
from .nccl_logs import job_log

LOG = job_log([2])


def line(found: Findings, name: str) -> str:
    """Return the one line about a file."""
    (text,) = [note.text for note in found.notes if name in note.file]
    return text


def tar_of(path: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def names(paths: list[Path | str]) -> list[str]:
    with gather(paths) as gathered:
        return [source.name.rpartition("/")[2] for source in gathered.sources]


def test_folders_globs_and_each_file_once(tmp_path: Path) -> None:
    for name in ("rank_10.log", "rank_2.log", "rank_9.log", "deep/x.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "again.log").symlink_to(tmp_path / "rank_2.log")
    # `again.log` is rank_2.log, under the name that comes first.
    assert names([tmp_path]) == ["again.log", "x.log", "rank_9.log", "rank_10.log"]
    assert names([str(tmp_path / "rank_*"), tmp_path / "rank_2.log"]) == ["rank_10.log", "rank_2.log", "rank_9.log"]
    assert names([str(tmp_path / "**" / "x.log")]) == ["x.log"]
    assert sorted(["r10", "r9", "r2"], key=natural_key) == ["r2", "r9", "r10"]


@pytest.mark.parametrize("packed", ["plain", "gz", "gz.gz", "tar", "tar.gz", "zip", "tar.gz in zip"])
def test_what_is_packed_reads_like_what_is_not(tmp_path: Path, packed: str) -> None:
    path, data = tmp_path / "thing", LOG.replace("Channel 00/02 :  0  1", "Channel 00/02 :  0  0").encode()
    if packed in ("tar", "tar.gz", "tar.gz in zip"):
        data = tar_of(path, {"a/b.log": data}, "w" if packed == "tar" else "w:gz").read_bytes()
    for _ in range(packed.count("gz") if packed.startswith("gz") else 0):
        data = gzip.compress(data)
    path.write_bytes(data)
    if "zip" in packed:
        with zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("inner", path.read_bytes())
        path = tmp_path / "z"
    found = examine([path])
    assert [verdict.kind for verdict in found.verdicts] == ["broken_ring"]
    assert [note.used for note in found.notes] == [True]


def test_a_truncated_gzip_is_used_as_far_as_it_goes_and_says_how_far(tmp_path: Path) -> None:
    data = gzip.compress(job_log([8, 8], channels=16).encode())
    (tmp_path / "cut.log.gz").write_bytes(data[: 2 * len(data) // 3])
    found = examine([tmp_path])
    assert [note.used for note in found.notes] == [True]
    assert "breaks off" in line(found, "cut")
    assert "are whole" in line(found, "cut")


def test_a_damaged_gzip_is_used_up_to_the_damage(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(os.urandom(3000) + LOG.encode()))
    data[-6] ^= 0xFF
    (tmp_path / "bad.gz").write_bytes(bytes(data))
    assert "damaged" in line(examine([tmp_path]), "bad")


def test_an_empty_folder_a_binary_and_nothing_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "nothing").touch()
    (tmp_path / "poem.txt").write_text("The ring\nof ranks")
    found = examine([tmp_path, tmp_path / "empty", tmp_path / "not-there"])
    assert "empty folder" in line(found, "/empty")
    assert "binary" in line(found, "noise")
    assert "empty" in line(found, "nothing")
    assert "starts with 'The ring" in line(found, "poem")
    assert "does not exist" in line(found, "not-there")
    assert not any(note.used for note in found.notes)


def test_bombs_are_refused_in_one_line_and_the_others_used(tmp_path: Path) -> None:
    (tmp_path / "good.log").write_text(LOG)
    limits = Limits(ratio_after_bytes=1 << 20)
    zeros = b"\0" * (8 << 20)
    (tmp_path / "zeros.gz").write_bytes(gzip.compress(zeros))
    (tmp_path / "text.log.gz").write_bytes(gzip.compress(LOG.encode() + b" " * (8 << 20)))
    tar_of(tmp_path / "bomb.tar.gz", {"zeros": zeros})
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", zeros)
    found = examine([tmp_path], limits=limits)
    assert "bomb" in line(found, "zeros.gz")
    assert "bomb" in line(found, "text.log.gz")
    assert any("bomb" in note.text for note in found.notes if "bomb.tar.gz" in note.file)
    assert "bomb" in line(found, "bomb.zip")
    assert "lines" in line(found, "good.log")
    assert len({note.file for note in found.notes}) == len(found.notes)


def test_unpacking_stops_at_the_limit_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "long.log.gz").write_bytes(gzip.compress(os.urandom(1 << 20)))
    with gather([tmp_path], limits=Limits(file_bytes=1 << 18)) as gathered:
        (source,) = gathered.sources
        with source.open() as stream:
            assert len(stream.read()) <= (1 << 18) + (1 << 18)
        assert "more than" in source.problems[0]


def test_hostile_members_of_a_tar_are_left_out_each_with_a_line(tmp_path: Path) -> None:
    deep = "/".join(["d"] * 100) + "/x.log"
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name in (deep, "../../escape.log", "/etc/absolute.log", "good.log"):
            info = tarfile.TarInfo(name)
            info.size = len(LOG)
            archive.addfile(info, io.BytesIO(LOG.encode()))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    found = examine([path])
    assert "101 levels deep" in line(found, "x.log")
    assert "leads out" in line(found, "escape")
    assert "leads out" in line(found, "absolute")
    assert "link" in line(found, "!link")
    assert [note.file.rpartition("!")[2] for note in found.notes if note.used] == ["good.log"]
    assert not (tmp_path.parent / "escape.log").exists()


@pytest.mark.parametrize(("depth", "why"), [(32, ""), (33, "is more than 32 folders deep and was left out")])
def test_a_folder_that_is_too_deep(tmp_path: Path, depth: int, why: str) -> None:
    deep = tmp_path.joinpath(*["d"] * depth)
    deep.mkdir(parents=True)
    (deep / "x.log").write_text(LOG)
    (note,) = examine([tmp_path]).notes
    assert note.used is not bool(why)
    assert not why or note.text == why


@pytest.mark.parametrize(
    ("mode", "archives", "why"),
    [
        ("w", 4, ""),
        ("w", 5, "is more than 3 archives deep and was left out"),
        ("w:gz", 2, ""),
        ("w:gz", 3, "is packed more than 3 times and was left out"),
        ("gz", 4, ""),
        ("gz", 5, "is packed more than 3 times and was left out"),
    ],
)
def test_archives_in_archives(tmp_path: Path, mode: str, archives: int, why: str) -> None:
    """A tar in a gzip is packed twice; what is given itself does not count."""
    data, packed = LOG.encode(), tmp_path / "packed"
    for level in range(archives):
        data = gzip.compress(data) if mode == "gz" else tar_of(packed, {f"level{level}": data}, mode).read_bytes()
    packed.write_bytes(data)
    (note,) = examine([tmp_path]).notes
    assert note.used is not bool(why)
    assert not why or note.text == why


def test_a_truncated_tar_gives_the_members_that_are_whole(tmp_path: Path) -> None:
    members = {f"dump_{index}.log": os.urandom(30_000) for index in range(3)} | {"a.log": LOG.encode()}
    data = tar_of(tmp_path / "x.tar", dict(reversed(members.items())), "w").read_bytes()
    (tmp_path / "x.tar").write_bytes(data[:50_000])
    found = examine([tmp_path])
    assert [note.file.rpartition("!")[2] for note in found.notes if note.used] == ["a.log"]
    assert "its archive breaks off: 16.2 kB of 30 kB are whole" in line(found, "dump_1")
    (archive,) = [note.text for note in found.notes if note.file == str(tmp_path / "x.tar")]
    assert archive.startswith("the archive breaks off after 3 members")


def test_dumps_in_a_tar_are_read_in_one_pass(tmp_path: Path) -> None:
    usual = [*map(call, range(1, 6)), call(6, done=False)]
    folder = write(tmp_path / "d", world(64, {7: usual[:5]}, usual))
    with tarfile.open(tmp_path / "d.tar.gz", "w:gz") as archive:
        archive.add(folder, "d")
    found = examine([tmp_path / "d.tar.gz"])
    assert [verdict.ranks for verdict in found.verdicts] == [[7]]
    assert sum(note.used for note in found.notes) == 64


def test_a_file_that_cannot_be_opened_has_its_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    found = examine([tmp_path / "pipe", tmp_path / "gone"])
    assert "not a plain file" in line(found, "pipe")
    assert "cannot be read" in line(found, "gone")


def test_members_of_a_zip_that_are_not_meant_well_are_left_out_each_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    odd = ("__MACOSX/good.log", "d/._good.log", "d/.DS_Store", "../up.log", "/root.log", "\\\\share\\x.log")
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("good.log", *odd, "n" * 4096, "m" * 4097, "/".join("d" * 33), "secret.log", "large.log"):
            archive.writestr(name, LOG)
        archive.writestr("d/", "")
        archive.writestr("bad.log", LOG.replace("NCCL", "MCCL"))
        archive.writestr("strange.log", LOG)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"secret.log") - 46  # its entry in the central directory
    data[at + 8] |= 1  # encrypted
    at = data.rindex(b"strange.log") - 46
    data[at + 10] = 97  # a compression that nobody knows
    data[data.index(b"MCCL")] = ord("N")  # not what its checksum is of
    path.write_bytes(bytes(data))
    found = examine([path], limits=Limits(file_bytes=len(LOG)))
    told = {note.file.rpartition("!")[2]: note for note in found.notes}
    refused = {name: note.text for name, note in told.items() if not note.used}
    assert told.keys() - refused.keys() == {"good.log", "n" * 4096, "large.log"}
    assert refused == {
        "bad.log": "has no complete entry; cannot be read further: Bad CRC-32 for file 'bad.log'",
        "../up.log": "has a path that leads out of its archive and was left out",
        "/root.log": "has a path that leads out of its archive and was left out",
        "\\\\share\\x.log": "has a path that leads out of its archive and was left out",
        f"{'m' * (100 - len(str(path)) - 1)}…{'m' * 40}": "has a name of 4097 characters and was left out",
        "/".join("d" * 33): "is 33 levels deep in its archive (at most 32) and was left out",
        "secret.log": "is encrypted and was left out",
        "strange.log": "has no complete entry; cannot be unpacked: That compression method is not supported",
    }
    refused_as_large = examine([path], limits=Limits(file_bytes=len(LOG) - 1))
    assert "refused as a compression bomb" in line(refused_as_large, "large.log")


def test_no_more_files_are_looked_at_than_asked_for(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.log").write_text(LOG)
    found = examine([tmp_path], limits=Limits(files=3))
    assert [note.used for note in found.notes] == [True] * 3 + [False] * 2
    assert {note.text for note in found.notes[3:]} == {"is beyond the 3 files that are looked at"}
    members = {f"{number}.log": LOG.encode() for number in range(4)}
    for count, refused in ((3, []), (4, ["has more than 3 members; the rest was left out"])):
        packed = tar_of(tmp_path / "x.tar", dict(list(members.items())[:count]))
        found = examine([packed], limits=Limits(files=3))
        assert sum(note.used for note in found.notes) == 3
        assert [note.text for note in found.notes if not note.used] == refused
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in members:
            archive.writestr(name, LOG)
    assert len(examine([tmp_path / "x.zip"], limits=Limits(files=3)).notes) == 3


def test_archives_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    (tmp_path / "cut.zip").write_bytes(b"PK\x03\x04" + b"x" * 100)
    assert line(examine([tmp_path]), "cut.zip").startswith("is a zip archive that cannot be read (File is not a zip")
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("good.log", "n" * 20_000):
            info = tarfile.TarInfo(name)
            info.size = len(LOG)
            archive.addfile(info, io.BytesIO(LOG.encode()))
    found = examine([path])
    assert [note.file.rpartition("!")[2] for note in found.notes if note.used] == ["good.log"]
    (archive_line,) = [note.text for note in found.notes if note.file == str(path)]
    assert archive_line.startswith("the archive breaks off after 1 members (a header of 20480 bytes)")


def test_members_of_a_gzip_follow_each_other_and_padding_ends_it(tmp_path: Path) -> None:
    halves = LOG[:1100].encode(), LOG[1100:].encode()
    for padding, used in ((b"", len(LOG)), (b"\0" * 700, len(LOG)), (b"no gzip", 1100)):
        data = gzip.compress(halves[0]) + padding + gzip.compress(halves[1]) + b"\0" * 100
        (tmp_path / "x.log.gz").write_bytes(data)
        with gather([tmp_path]) as gathered:
            (source,) = gathered.sources
            assert source.read(1 << 20).decode() == LOG[:used]
            assert source.read(used).decode() == LOG[:used]
            assert source.problems == []
            assert source.read(1024).decode() == LOG[:1024]
            assert source.problems == ["is larger than 1 KiB; only that much of it was read"]
