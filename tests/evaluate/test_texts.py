import numpy as np
import pytest

from kvstow.errors import TextError
from kvstow.evaluate.texts import SOURCES, Text, bundled, passages, read_files


class Words:
    """A tokenizer of words, numbered by their length."""

    def encode(self, text):
        return [len(word) for word in text.split()]


def test_the_bundled_sources_are_taken_in_turn():
    texts = bundled()
    assert [text.source for text in texts[:6]] == [*SOURCES] * 3
    assert len({text.name for text in texts if text.source == "moby-dick"}) == 16
    assert {text.source for text in bundled(["moby-dick"])} == {"moby-dick"}


def test_sixteen_texts_of_two_sources_are_long_enough_for_long_windows():
    assert min(len(text.text.split()) for text in bundled()[:16]) > 1000


def test_passages_begin_where_the_text_does():
    texts = [Text("file", "a", "I am the one"), Text("file", "b", "who was here before")]
    found = passages(Words(), texts, 3)
    assert np.array_equal(found.tokens, [[1, 2, 3], [3, 3, 4]])
    assert found.names == ("file/a", "file/b")
    assert found.about() | {"sha256": 0} == {"n_texts": 2, "sources": {"file": 2}, "sha256": 0}


def test_equal_digests_are_equal_tokens():
    def digest(text):
        return passages(Words(), [Text("file", "a", text)], 3).about()["sha256"]

    assert digest("I am the one") == digest("I am the other")
    assert digest("I am the one") != digest("I was the one")


def test_a_text_shorter_than_the_window_is_refused_by_name():
    with pytest.raises(TextError, match="file/short has 2 tokens, and 3 are needed"):
        passages(Words(), [Text("file", "short", "too short")], 3)


def test_too_few_texts_are_refused():
    with pytest.raises(TextError, match="3 texts are needed, there are 1"):
        passages(Words(), [Text("file", "a", "b c")], 1, n=3)
    with pytest.raises(TextError, match="1 texts are needed, there are 0"):
        passages(Words(), [], 1)


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(TextError, match="UTF-8"):
        read_files([tmp_path / "bytes"])
    with pytest.raises(TextError, match="cannot read"):
        read_files([tmp_path / "absent"])
    with pytest.raises(TextError, match="unknown source 'web'"):
        bundled(["web"])


def test_a_users_files_are_read(tmp_path):
    (tmp_path / "mine.txt").write_text("\ufeffmine", encoding="utf-8")
    assert read_files([tmp_path / "mine.txt"]) == [Text("file", "mine.txt", "mine")]
