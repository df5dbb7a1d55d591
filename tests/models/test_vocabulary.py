import json
from types import SimpleNamespace

import pytest

from kvstow.errors import ModelFileError
from kvstow.models.locate import Source
from kvstow.models.vocabulary import read_vocabulary


def in_directory(folder, content):
    (folder / "tokenizer.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    return read_vocabulary(Source("directory", str(folder), folder))


def test_of_a_gguf_file_it_is_the_list_of_tokens(tiny_gguf):
    path = tiny_gguf()
    vocabulary = read_vocabulary(Source("gguf", str(path), path))
    assert (vocabulary["hi"], vocabulary["</s>"], len(vocabulary)) == (256, 258, 260)


def test_of_a_directory_it_is_that_of_the_tokenizer_with_the_added_tokens(tmp_path):
    added = [{"id": 2, "content": "<s>"}]
    bpe = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added}
    unigram = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": added}
    assert in_directory(tmp_path, bpe) == in_directory(tmp_path, unigram)
    assert in_directory(tmp_path, bpe) == {"a": 0, "b": 1, "<s>": 2}


@pytest.mark.usefixtures("cache")
def test_a_converted_model_has_the_vocabulary_of_its_file(tiny_gguf):
    convert = pytest.importorskip("kvstow.models.convert").convert
    for architecture in ("llama", "gemma3"):
        path = tiny_gguf(architecture)
        folder = convert(path, "float32")
        sources = (Source("gguf", "", path), Source("directory", "", folder))
        of_file, of_folder = map(read_vocabulary, sources)
        assert of_file.items() <= of_folder.items()  # transformers may add one


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}', '{"model": {"vocab": [1]}}'])
def test_a_damaged_tokenizer_is_an_error_that_names_the_file(tmp_path, content):
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is damaged"):
        in_directory(tmp_path, content)


def test_without_the_file_only_the_tokenizer_knows(tmp_path, monkeypatch):
    assert read_vocabulary(Source("directory", str(tmp_path), tmp_path)) is None

    def unreachable(*_):
        raise OSError("offline")

    hub = SimpleNamespace(hf_hub_download=unreachable)
    monkeypatch.setattr("kvstow.models.vocabulary.require", lambda _: hub)
    assert read_vocabulary(Source("hub", "owner/name")) is None
