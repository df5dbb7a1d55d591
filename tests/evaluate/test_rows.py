import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import EvaluationError
from kvstow.evaluate.rows import ResultFile, read_rows

ROW = {"measure": "kl", "model": "m", "arm": "off", "dtype": "float32", "mean_kl_nats": 0.0}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


def test_a_row_is_found_again_by_what_was_asked(path):
    ResultFile(path).append(ROW | {"started": "today"})
    again = ResultFile(path)
    asked = {"measure": "kl", "model": "m", "arm": "off", "dtype": "float32"}
    assert again.find(**asked) == ROW | {"started": "today"}
    for other in ({"arm": "turbo"}, {"model": "n"}, {"dtype": "float16"}, {"window": {"n": 1}}):
        assert again.find(**(asked | other)) is None


def test_no_file_keeps_rows_in_memory():
    results = ResultFile(None)
    results.append(ROW)
    assert results.rows == [ROW]


@given(cut=st.integers(min_value=1, max_value=200))
def test_a_row_that_was_being_written_is_cut_off_and_nothing_else_is_lost(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    first, second = ROW, ROW | {"arm": "turbo:k8v3", "note": "x" * 200}
    results = ResultFile(path)
    results.append(first)
    results.append(second)
    path.write_bytes(path.read_bytes()[:-cut])
    taken_up = ResultFile(path)
    assert (taken_up.rows, taken_up.interrupted) == ([first], True)
    taken_up.append(second)
    taken_up.append(third := ROW | {"arm": "affine:8"})
    assert ResultFile(path).rows == [first, second, third]
    assert not ResultFile(path).interrupted


def test_reading_an_interrupted_file_changes_nothing(path):
    path.write_text(json.dumps(ROW) + '\n{"measure": "k')
    before = path.read_bytes()
    assert read_rows([path]) == [ROW]
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", ["{", "[]", "3", "{}", '{"measure": "mood"}', "\x00", ""])
def test_a_whole_line_that_is_no_row_is_refused_with_its_number(path, line):
    path.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(EvaluationError, match=r"rows\.jsonl:2 is no row of results"):
        ResultFile(path)


def test_a_file_that_is_not_there_or_has_no_rows_is_refused(path):
    with pytest.raises(EvaluationError, match="not a file"):
        read_rows([path])
    path.write_text("")
    with pytest.raises(EvaluationError, match="no rows"):
        read_rows([path])
    with pytest.raises(EvaluationError, match="no rows"):
        read_rows([])
