import numpy as np
import pytest

from ringside.demo import corpus
from ringside.demo.corpus import Corpus, sources
from ringside.errors import UsageError


def test_the_standard_library_is_there_without_tests_and_packages():
    found = sources()
    assert any(path.name == "argparse.py" for path in found)
    assert not any({"site-packages", "test"} & set(path.parts[-3:-1]) for path in found)
    assert found == sorted(found)


def test_ranks_share_no_file_and_every_file_is_dealt(tmp_path):
    for index in range(7):
        (tmp_path / f"{index}.py").write_text(f"# {index}\n" * 20)
    shares = [Corpus(tmp_path, rank, 3, 16) for rank in range(3)]
    dealt = [path.name for share in shares for path in share.files]
    assert sorted(dealt) == [f"{index}.py" for index in range(7)]
    batch = shares[1].batch(np.random.default_rng(1), 5)
    assert batch.shape == (5, 17)
    assert batch.dtype == np.int64
    assert np.array_equal(batch, shares[1].batch(np.random.default_rng(1), 5))
    text = bytes(shares[1].text)
    assert all(bytes(row.astype(np.uint8)) in text for row in batch)


def test_no_sources_and_too_few_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(UsageError, match="--corpus"):
        sources(tmp_path)
    (tmp_path / "a.py").write_text("x")
    with pytest.raises(UsageError, match="rank 1 of 2 has 0 bytes"):
        Corpus(tmp_path, 1, 2, 16)


def test_a_share_has_as_much_text_as_is_enough_and_files_that_cannot_be_read_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "ENOUGH_BYTES", 100)
    for index in range(5):
        (tmp_path / f"{index}.py").write_text("x" * 40)
    assert len(Corpus(tmp_path, 0, 1, 16).text) == 120
    assert len(Corpus(tmp_path, 0, 2, 16).text) == 120
    monkeypatch.setattr(corpus, "ENOUGH_BYTES", 80)
    assert len(Corpus(tmp_path, 0, 1, 16).text) == 80
    (tmp_path / "0.py").unlink()
    (tmp_path / "0.py").symlink_to(tmp_path / "nowhere")
    assert len(Corpus(tmp_path, 0, 2, 16).text) == 80
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.py").write_text("y" * 18)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.py").write_text("y" * 17)
    assert len(Corpus(tmp_path / "a", 0, 1, 16).batch(np.random.default_rng(0), 1)) == 1
    with pytest.raises(UsageError, match="has 17 bytes"):
        Corpus(tmp_path / "b", 0, 1, 16)
