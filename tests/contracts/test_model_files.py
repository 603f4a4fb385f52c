"""A model's folder is whole, or the reason says what is missing."""

import json
from pathlib import Path

import pytest

from contracts.model_files import ModelFilesError, read_model_files
from tests.model_folders import CONFIG, KV_BYTES_PER_TOKEN, write_model, write_weights


@pytest.fixture
def folder(tmp_path: Path, models_dir: Path) -> Path:
    return write_model(tmp_path / "model", models_dir / "tiny")


def test_a_whole_folder_says_its_sizes(folder: Path) -> None:
    found = read_model_files(folder)
    assert found.weight_bytes == (folder / "model.safetensors").stat().st_size
    assert found.context_tokens == 1024
    assert found.shape.kv_bytes_per_token() == KV_BYTES_PER_TOKEN == 256


def test_a_download_that_broke_off_is_seen_by_the_header_of_its_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelFilesError, match="is not whole: "):
        read_model_files(folder)
    weights.write_bytes(weights.read_bytes()[:20])
    with pytest.raises(ModelFilesError, match="header is cut off"):
        read_model_files(folder)


def test_every_file_that_the_index_names_must_be_there(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match="no weights"):
        read_model_files(folder)
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    write_weights(folder / names["a"], 100)
    with pytest.raises(ModelFilesError, match="lacks weights that its index names: model-00002"):
        read_model_files(folder)
    write_weights(folder / names["b"], 50)
    assert read_model_files(folder).weight_files == 2


def test_an_index_cannot_point_out_of_the_folder(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model/model.safetensors"}}))
    with pytest.raises(ModelFilesError):
        read_model_files(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_without_config_or_tokenizer_it_is_no_model(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelFilesError, match=f"has no {name}"):
        read_model_files(folder)


def test_a_config_without_sizes_is_named(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": None}))
    with pytest.raises(ModelFilesError, match="num_hidden_layers is missing"):
        read_model_files(folder)
