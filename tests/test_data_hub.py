"""`hf:org/name@revision`, offline on a cache that is laid out as the hub's: models, tokenizers and data."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from cispo_jax import weights
from cispo_jax.config import ConfigError, DataSettings
from cispo_jax.data import files, hub
from cispo_jax.data.tokenizers import character_tokenizer, save_tokenizer

MODEL = Path(__file__).parent / "data" / "families" / "qwen3"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache with a model `lab/tiny` (main and v2) and a data set `lab/sums`, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for repository in ("models--lab--tiny", "datasets--lab--sums"):
        (tmp_path / repository / "refs").mkdir(parents=True)
        for revision in ("main", "v2"):
            (tmp_path / repository / "refs" / revision).write_text(COMMIT)
    model = shutil.copytree(MODEL, tmp_path / "models--lab--tiny" / "snapshots" / COMMIT)
    save_tokenizer(character_tokenizer("0123456789"), model)
    table = pyarrow.table({"prompt": ["1+1", "2+2"], "answer": ["2", "4"]})
    data = tmp_path / "datasets--lab--sums" / "snapshots" / COMMIT / "data"
    data.mkdir(parents=True)
    pyarrow.parquet.write_table(table, data / "train.parquet")
    (data / "test.jsonl").write_text(json.dumps({"prompt": "3+3", "answer": "6"}) + "\n")
    return tmp_path


def test_a_model_and_its_tokenizer():
    for spec in ("hf:lab/tiny", "hf:lab/tiny@v2", f"hf:lab/tiny@{COMMIT}"):
        assert weights.load_config(spec) == weights.load_config(MODEL)
        assert weights.load_tokenizer(spec).encode("31") == [5, 3]
    assert weights.context_length("hf:lab/tiny") == 128


def test_a_file_of_a_data_set():
    read = lambda spec: files.read(spec, DataSettings(), "config.data.source").examples
    assert [row["answer"] for row in read("hf:lab/sums@v2:data/train.parquet")] == ["2", "4"]
    assert [row["answer"] for row in read("hf:lab/sums:data/test.jsonl")] == ["6"]
    with pytest.raises(ConfigError, match=r"must be named.*data/test\.jsonl, data/train\.parquet"):
        read("hf:lab/sums")
    with pytest.raises(
        ConfigError, match=r"config\.data\.source='hf:lab/sums:data/no\.parquet': there is no such file"
    ):
        read("hf:lab/sums:data/no.parquet")
    with pytest.raises(ConfigError, match=r"only \*\.parquet and \*\.jsonl"):
        read("hf:lab/sums:data/train.py")


@pytest.mark.parametrize(
    "spec", ["hf:tiny", "hf:lab/tiny@", "hf:lab/../tiny", "hf:lab/tiny:../x.parquet", "hf:lab/tiny /x"]
)
def test_malformed_specs(spec):
    with pytest.raises(ConfigError, match=r"the form is hf:ORGANISATION/NAME"):
        hub.fetch_data(spec, "config.data.source")


def test_what_the_cache_does_not_hold():
    for spec in ("hf:lab/other", "hf:lab/tiny@v3"):
        with pytest.raises(ConfigError, match=f"config.model.weights='{spec}' could not be fetched") as error:
            weights.load_config(spec)
        assert "\n" not in str(error.value)


def test_nothing_that_runs_is_fetched(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options) or str(MODEL)
    )
    weights.load_config("hf:lab/tiny@v2")
    assert asked["revision"] == "v2" and asked["repo_type"] == "model"
    assert asked["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'cispo-jax\[hub\]'"):
        weights.load_config("hf:lab/tiny")
