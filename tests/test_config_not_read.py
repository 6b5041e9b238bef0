"""Keys of a config.json that the decoder does not know are said when a model is loaded, and no others."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from fastcache import moe
from fastcache.cli import main
from fastcache.errors import UnsupportedCheckpoint
from fastcache.moe.asked import Asked

DATA = Path(__file__).parent / "data"
PATHS = sorted(path.parent for path in DATA.glob("*/*/config.json"))


@pytest.fixture
def changed(tmp_path):
    """A function: the checkpoint at a path, with more in its config.json."""

    def change(path, part=None, **more):
        shutil.copytree(path, tmp_path / "model", dirs_exist_ok=True)
        config = json.loads((path / "config.json").read_text())
        (config if part is None else config.setdefault(part, {})).update(more)
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        return tmp_path / "model"

    return change


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_of_a_usual_config_nothing_is_left_and_nothing_is_said(path, caplog):
    with moe.load(path, experts="resident") as model:
        assert model.not_read == {}
    assert "config.json" not in caplog.text


def test_what_the_hubs_configs_have_beside_is_no_news(changed):
    usual = {
        "architectures": ["X"], "transformers_version": "4.51.0", "torch_dtype": "bfloat16", "bos_token_id": 1,
        "initializer_range": 0.02, "attention_dropout": 0.1, "router_aux_loss_coef": 0.001,
        "output_router_logits": True,
        "max_window_layers": 48, "decoder_sparse_step": 1, "use_cache": True, "ep_size": 1, "aux_loss_alpha": 0.001,
        "auto_map": {"AutoConfig": "a.B"}, "vision_config": {"depth": 3}, "_attn_implementation": "eager",
    }  # fmt: skip
    with moe.load(changed(DATA / "qwen3_moe" / "bf16", **usual), experts="resident") as model:
        assert model.not_read == {}


def test_an_unheard_of_key_is_said_once_with_its_value(changed, caplog):
    path = changed(
        DATA / "qwen3_moe" / "bf16", attention_twist=0.5, new_norm={"kind": "odd", "on": False}, nothing=None
    )
    with caplog.at_level(logging.WARNING, "fastcache"), moe.load(path, budget="all") as model:
        assert model.not_read == {"attention_twist": 0.5, "new_norm.kind": "odd"}
        model.forward([1, 2])
    (record,) = [record for record in caplog.records if "config.json" in record.getMessage()]
    assert record.getMessage() == (
        f"{path}: of config.json, the decoder of qwen3_moe does not read attention_twist (0.5), new_norm.kind ('odd')"
    )


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_a_value_that_asks_for_nothing_is_not_said(changed, value):
    with moe.load(changed(DATA / "qwen3_moe" / "bf16", attention_twist=value), experts="resident") as model:
        assert model.not_read == {}


def test_a_key_that_is_known_to_change_tokens_is_refused_still(changed):
    with pytest.raises(UnsupportedCheckpoint, match="alibi is True"):
        moe.load(changed(DATA / "qwen3_moe" / "bf16", alibi=True), experts="resident")


def test_the_command_says_it_too(changed):
    path = changed(DATA / "qwen3_moe" / "bf16", attention_twist=0.5)
    result = CliRunner().invoke(main, ["generate", str(path), "--ids", "1,5", "--max-tokens", "1", "--json"])
    assert json.loads(result.stdout)["config_not_read"] == {"attention_twist": 0.5}


def test_what_was_asked_for_is_remembered_in_parts_too():
    config = Asked({"a": 1, "text_config": {"b": 2, "c": 3}, "rope": {"kind": "x", "factor": 2.0}, "d": 4})
    assert config["a"] == 1 and config["text_config"]["b"] == 2 and config.get("e") is None
    assert config["rope"].get("kind") == "x"
    assert config.left() == {"text_config.c": 3, "rope.factor": 2.0, "d": 4}
    assert {**config["rope"]} == {"kind": "x", "factor": 2.0} and "d" in config
    assert config.left() == {"text_config.c": 3}
