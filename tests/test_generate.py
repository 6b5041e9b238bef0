"""Sampling, stopping, text, and `fastcache generate`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from trunks import tensors_of

from fastcache import moe
from fastcache.errors import CheckpointChanged, CheckpointMismatch, CheckpointNotFound, UnsupportedCheckpoint
from fastcache.moe.cache import LayerCache
from fastcache.moe.sampling import sample
from fastcache.moe.tokens import Detokenizer, tokenizer_of

DATA = Path(__file__).parent / "data"
PATH = DATA / "qwen3_moe" / "bf16"
IDS = [1, 5, 7, 9]


@pytest.fixture
def model():
    with moe.load(PATH, budget="all") as model:
        yield model


def test_temperature_zero_is_the_likeliest_and_the_first_of_equals():
    rng = np.random.default_rng(0)
    assert sample(np.array([1, 3, 3, 0], np.float32), rng) == 1


def test_samples_follow_the_probabilities_and_keep_to_top_k_and_top_p():
    rng = np.random.default_rng(0)
    logits = np.log(np.array([0.1, 0.5, 0.15, 0.25], np.float32))

    def shares(**how):
        drawn = [sample(logits, rng, temperature=1.0, **how) for _ in range(4000)]
        return np.bincount(drawn, minlength=4) / 4000

    np.testing.assert_allclose(shares(), [0.1, 0.5, 0.15, 0.25], atol=0.04)
    np.testing.assert_allclose(shares(top_k=2), [0, 2 / 3, 0, 1 / 3], atol=0.04)
    np.testing.assert_allclose(shares(top_p=0.7), [0, 2 / 3, 0, 1 / 3], atol=0.04)
    assert shares(top_p=0.4)[1] == 1
    hot = [sample(logits, rng, temperature=100.0) for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(hot) / 4000, 0.25, atol=0.04)


@pytest.mark.parametrize("temperature", [1e-300, 1e-308, 5e-324])
def test_however_low_the_temperature_the_likeliest_is_chosen(temperature):
    rng = np.random.default_rng(0)
    logits = np.array([1, 9, 8, -5, -np.inf], np.float32)
    assert {sample(logits, rng, temperature=temperature) for _ in range(20)} == {1}
    assert {sample(logits, rng, temperature=1e300, top_k=4) for _ in range(200)} == {0, 1, 2, 3}


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_choose_no_token(broken, temperature):
    with pytest.raises(ValueError, match=r"no numbers: that of token 1 is"):
        sample(np.array([1, broken, 3], np.float32), np.random.default_rng(0), temperature=temperature)


def test_a_seed_gives_the_same_tokens_again_and_another_gives_others(model):
    def tokens(seed):
        return list(model.generate(IDS, 12, temperature=3.0, seed=seed, stop=()))

    assert tokens(7) == tokens(7) != tokens(8)


def test_generation_ends_before_a_stop_token_and_a_cache_lets_it_go_on(model):
    free = list(model.generate(IDS, 8, stop=()))
    place = next(i for i, token in enumerate(free) if token not in free[:i] and i > 1)
    assert list(model.generate(IDS, 8, stop=[free[place]])) == free[:place]
    cache = model.new_cache()
    first = list(model.generate(IDS, 3, stop=(), cache=cache))
    assert first + list(model.generate(first[-1:], 5, stop=(), cache=cache)) == free


def test_the_models_own_end_is_read_from_both_configs(tmp_path, model):
    assert model.eos == {2}
    shutil.copytree(PATH, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [2, 77]}')
    with moe.load(tmp_path / "model") as other:
        assert other.eos == {2, 77}


def test_wrong_ids_and_settings_are_named(model):
    for ids in ([], [[1]], [1.5], [128], [-1]):
        with pytest.raises(ValueError, match="ids must be"):
            model.forward(ids)
    for wrong in ({"temperature": -1}, {"temperature": np.inf}, {"temperature": np.nan}, {"top_k": 0}, {"top_p": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            model.generate(IDS, 1, **wrong)
    with pytest.raises(ValueError, match="budget, engine: for experts that are streamed"):
        moe.load(PATH, experts="resident", budget="all", engine="pread")
    with pytest.raises(ValueError, match='experts is "stream" or "resident"'):
        moe.load(PATH, experts="disk")
    with pytest.raises(ValueError, match='predictor is a Predictor, "lookahead" or None'):
        moe.load(PATH, predictor="lokahead")


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"stop": "ab"}, TypeError, "stop takes token ids, not text; got 'ab'"),
        ({"stop": b"ab"}, TypeError, "stop takes token ids, not text"),
        ({"stop": ["ab"]}, TypeError, "each token of stop must be an integer; got 'ab'"),
        ({"stop": [[1, 2]]}, TypeError, r"each token of stop must be an integer; got \[1, 2\]"),
        ({"stop": True}, TypeError, "each token of stop must be an integer; got True"),
        ({"stop": 1.5}, TypeError, "each token of stop must be an integer; got 1.5"),
        ({"stop": {3, 128}}, ValueError, "tokens of stop must be from 0 to 127, in a vocabulary of 128; got 128"),
        ({"stop": -1}, ValueError, "tokens of stop must be from 0 to 127, in a vocabulary of 128; got -1"),
        ({"temperature": "warm"}, TypeError, "temperature must be a number; got 'warm'"),
        ({"temperature": True}, TypeError, "temperature must be a number; got True"),
        ({"temperature": None}, TypeError, "temperature must be a number; got None"),
        ({"top_k": 1.5}, TypeError, "top_k must be an integer, or None; got 1.5"),
        ({"top_k": True}, TypeError, "top_k must be an integer, or None; got True"),
        ({"top_k": "3"}, TypeError, "top_k must be an integer, or None; got '3'"),
        ({"top_p": "half"}, TypeError, "top_p must be a number, or None; got 'half'"),
        ({"top_p": True}, TypeError, "top_p must be a number, or None; got True"),
        ({"top_p": 1.5}, ValueError, "top_p must be above 0 and at most 1, or None; got 1.5"),
        ({"top_p": float("nan")}, ValueError, "top_p must be above 0"),
        ({"seed": 1.5}, TypeError, "seed must be an integer, or None; got 1.5"),
        ({"seed": "x"}, TypeError, "seed must be an integer, or None; got 'x'"),
        ({"seed": False}, TypeError, "seed must be an integer, or None; got False"),
        ({"seed": -1}, ValueError, "seed must be at least 0, or None; got -1"),
        ({"max_tokens": True}, TypeError, "max_tokens must be an integer; got True"),
        ({"max_tokens": "5"}, TypeError, "max_tokens must be an integer; got '5'"),
        ({"cache": [1, 2]}, TypeError, "cache is a KVCache"),
        ({"ids": [[1], [2, 3]]}, ValueError, "ids must be a list of token ids"),
        ({"ids": "ab"}, ValueError, "ids must be a list"),
        ({"ids": [True]}, ValueError, "ids must be integers; got bool"),
    ],
)
def test_a_wrong_argument_is_refused_at_the_call_and_named(model, wrong, error, said):
    with pytest.raises(error, match=said):
        model.generate(**{"ids": IDS, "max_tokens": 1, **wrong})


def test_stop_is_a_token_or_any_number_of_them(model):
    free = list(model.generate(IDS, 8, stop=()))
    end = next(token for i, token in enumerate(free) if token not in free[:i] and i > 1)
    before = free[: free.index(end)]
    other = next(token for token in range(128) if token not in free)
    for stop in (end, [end], {end, other}, np.int64(end), np.array(end), np.array([other, end]), (t for t in (end,))):
        assert list(model.generate(IDS, 8, stop=stop)) == before
    arguments = {"temperature": np.float32(0.5), "top_k": np.int32(3), "top_p": np.float64(0.9), "seed": np.uint8(1)}
    assert len(list(model.generate(IDS, np.int64(2), stop=(), **arguments))) == 2


def test_however_generation_ends_the_cache_has_all_but_the_last_token_and_goes_on_as_if_it_had_not(model):
    free = list(model.generate(IDS, 12, stop=()))
    first_seen = [i for i, token in enumerate(free) if token not in free[:i]]
    for given in range(8):
        endings = {"most": {"max_tokens": given, "stop": ()}}
        if given in first_seen:
            endings["stop"] = {"max_tokens": 12, "stop": free[given]}
        for how in endings.values():
            cache = model.new_cache()
            assert list(model.generate(IDS, **how, cache=cache)) == free[:given]
            text = IDS + free[:given]
            assert cache.length == len(text) - 1, how
            rest = list(model.generate(text[cache.length :], 12 - given, stop=(), cache=cache))
            assert rest == free[given:], how
    cache = model.new_cache()
    for _ in zip(range(3), model.generate(IDS, 12, stop=(), cache=cache), strict=False):  # left by the one who asked
        pass
    assert cache.length == len(IDS) + 2


def test_a_prompt_of_one_token_that_stops_at_once_leaves_an_empty_cache(model):
    (end,) = model.generate([5], 1, stop=())
    cache = model.new_cache()
    assert list(model.generate([5], 4, stop=end, cache=cache)) == [] and cache.length == 0
    assert list(model.generate([5], 0, cache=cache)) == [] and cache.length == 0


def test_the_cache_of_another_model_is_refused_before_anything_is_computed(model, tmp_path):
    shutil.copytree(PATH, tmp_path / "other")
    asked = model.store.stats().requests
    with moe.load(DATA / "mixtral" / "bf16") as shorter, moe.load(tmp_path / "other") as twin:
        for cache, said in (
            (moe.KVCache(2), "a cache of 2 layers was given to qwen3_moe of 3 layers in .*, which has 3"),
            (shorter.new_cache(), "a cache of 2 layers"),
        ):
            with pytest.raises(CheckpointMismatch, match=said):
                model.forward(IDS, cache)
            with pytest.raises(CheckpointMismatch, match=said):
                model.generate(IDS, 1, cache=cache)
        cache = twin.new_cache()
        twin.forward(IDS, cache)
        with pytest.raises(CheckpointMismatch, match="4 tokens of qwen3_moe of 3 layers in .*other"):
            model.forward(IDS, cache)
    cache = moe.KVCache(3)
    cache[0].append(np.zeros((1, 7), np.float32))
    with pytest.raises(CheckpointMismatch, match=r"layers of this cache have \[0, 1\] tokens"):
        model.forward(IDS, cache)
    cache[1].append(np.zeros((1, 7), np.float32))
    cache[2].append(np.zeros((1, 7), np.float32))
    with pytest.raises(CheckpointMismatch, match=r"keeps rows of \(\(7,\),\) .* are \(\(2, 16\), \(2, 16\)\)"):
        model.forward(IDS, cache)
    assert model.store.stats().requests == asked


def test_streamed_and_resident_models_of_one_checkpoint_share_a_cache(model):
    cache = model.new_cache()
    first = list(model.generate(IDS, 4, stop=(), cache=cache))
    with moe.load(PATH, experts="resident") as resident:
        rest = list(resident.generate(first[-1:], 4, stop=(), cache=cache))
    assert first + rest == list(model.generate(IDS, 8, stop=()))


def test_a_step_that_fails_leaves_the_cache_as_it_was(model, monkeypatch):
    cache = model.new_cache()
    model.forward(IDS, cache)
    before = model.forward([3], cache)
    cache.truncate(len(IDS))
    calls = []

    def fail_late(self, *rows):
        calls.append(self)
        if len(calls) == 3:
            raise MemoryError
        return append(self, *rows)

    append = LayerCache.append
    monkeypatch.setattr(LayerCache, "append", fail_late)
    with pytest.raises(MemoryError):
        model.forward([3], cache)
    monkeypatch.undo()
    assert [each.length for each in cache] == [len(IDS)] * model.layers
    assert model.forward([3], cache).tobytes() == before.tobytes()


def test_a_head_that_fails_leaves_the_cache_as_it_was_too(model, monkeypatch):
    cache = model.new_cache()
    model.forward(IDS, cache)
    monkeypatch.setattr(model, "_head", "not.there.weight")
    with pytest.raises(KeyError):
        model.forward([3], cache)
    assert [each.length for each in cache] == [len(IDS)] * model.layers


@pytest.mark.parametrize("experts", ["stream", "resident"])
def test_a_trunk_that_is_written_to_in_place_ends_generation(tmp_path, experts):
    shutil.copytree(PATH, tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    wanted = file.read_bytes()
    with moe.load(tmp_path / "model", experts=experts) as model:
        cache = model.new_cache()
        tokens = model.generate(IDS, 6, stop=(), cache=cache)
        next(tokens)
        status = file.stat()
        with open(file, "r+b") as written:  # of the same size, and in the page cache that is mapped
            written.seek(len(wanted) // 2)
            written.write(bytes(len(wanted) // 2))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
        with pytest.raises(CheckpointChanged, match="has changed since"):
            next(tokens)
        assert cache.length == len(IDS)


def test_a_file_that_is_replaced_by_renaming_changes_nothing(tmp_path):
    shutil.copytree(PATH, tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    with moe.load(tmp_path / "model") as model:
        wanted = list(model.generate(IDS, 6, stop=()))
        (tmp_path / "other").write_bytes(bytes(file.stat().st_size))
        os.replace(tmp_path / "other", file)
        assert list(model.generate(IDS, 6, stop=())) == wanted
        file.unlink()
        assert list(model.generate(IDS, 6, stop=())) == wanted


def test_resident_experts_do_not_pass_for_checked_ones(monkeypatch):
    monkeypatch.setenv("FASTCACHE_VERIFY", "sidecar")
    with pytest.raises(ValueError, match="FASTCACHE_VERIFY is set"):
        moe.load(PATH, experts="resident")
    monkeypatch.setenv("FASTCACHE_VERIFY", "off")
    assert moe.load(PATH, experts="resident").store is None


def test_the_environment_opts_in_to_two_gibibytes_and_a_budget_wins(monkeypatch):
    monkeypatch.setenv("FASTCACHE_SSD_STREAMING", "1")
    with moe.load(PATH) as model:
        assert model.store.budget_bytes == 2 << 30
    with moe.load(PATH, budget=1 << 20) as model:
        assert model.store.budget_bytes == 1 << 20
    monkeypatch.setenv("FASTCACHE_EXPERT_CACHE_BYTES", "2MiB")
    with moe.load(PATH) as model:
        assert model.store.budget_bytes == 2 << 20
    monkeypatch.delenv("FASTCACHE_EXPERT_CACHE_BYTES")
    monkeypatch.setenv("FASTCACHE_SSD_STREAMING", "yes")
    with pytest.raises(ValueError, match="FASTCACHE_SSD_STREAMING"):
        moe.load(PATH)


def test_a_family_without_a_decoder_is_refused(tmp_path):
    shutil.copytree(PATH, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": "something_new"}))
    with pytest.raises(UnsupportedCheckpoint, match="no NumPy decoder for the family 'unknown'"):
        moe.load(tmp_path / "model")


def test_a_mapped_trunk_is_never_copied_as_a_whole(tmp_path):
    save = pytest.importorskip("safetensors.numpy").save_file
    shutil.copytree(PATH, tmp_path / "model")
    tensors = tensors_of(PATH)
    rng = np.random.default_rng(0)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = rng.standard_normal((400_000, 64), np.float32).astype(ml_dtypes.bfloat16)  # 51 MB
    save(tensors, tmp_path / "model" / "model.safetensors")
    program = """
import re, sys
from fastcache import moe
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10
with moe.load(sys.argv[1], budget="1 B") as model:  # libraries and threads are there after this one
    model.forward([1])
before = anonymous()
with moe.load(sys.argv[1], budget="1 B") as model:
    print(model.forward([1, 399_999], last_only=True).shape, anonymous() - before)
"""
    shown = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "model"], capture_output=True, text=True, check=True
    )
    shape, _, grown = shown.stdout.rpartition(" ")
    assert shape == "(1, 400000)" and int(grown) < 16 << 20  # logits are 1.6 MB


def words(path):
    """Write a tokenizer of 128 words, w0 to w127, beside a copy of the checkpoint."""
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(PATH, path)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path / "tokenizer.json"))


def run(*arguments):
    command = [sys.executable, "-m", "fastcache", "generate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_gives_the_same_tokens_as_text_as_ids_and_as_json(tmp_path, model):
    words(tmp_path / "model")
    free = list(model.generate(IDS, 6, stop=()))
    prompt = " ".join(f"w{i}" for i in IDS)
    common = ("--max-tokens", 6, "--budget", "2 cycles", "--ignore-eos")
    shown = run(tmp_path / "model", "--prompt", prompt, *common)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == " ".join(f"w{i}" for i in free) + "\n"
    shown = run(PATH, "--ids", ",".join(map(str, IDS)), *common)
    assert shown.stdout.split() == [str(i) for i in free]
    result = json.loads(run(tmp_path / "model", "--prompt", prompt, "--json", *common).stdout)
    assert result["tokens"] == free and result["text"] == " ".join(f"w{i}" for i in free)
    assert result["prompt_tokens"] == 4 and result["tokens_per_s"] > 0 and result["rss_bytes"] > 1 << 20
    assert result["stats"]["requests"] > 0 and result["engine"] in ("uring", "pread") and result["budget_bytes"] > 0


def test_the_command_says_what_is_missing():
    for arguments, text in [((), "--prompt or --ids"), (("--prompt", "x"), "tokenizer.json"), (("--ids", "a"), "list")]:
        refused = run(PATH, *arguments)
        assert refused.returncode != 0 and text in refused.stderr and "Traceback" not in refused.stderr
    with pytest.raises(CheckpointNotFound, match="ids"):
        tokenizer_of(PATH)


def test_half_a_character_is_held_back_until_it_is_whole():
    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    given = Detokenizer(Bytes())
    assert [given.add(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert given.add(0xC3) == "" and given.end() == "\ufffd"
    assert given.text == "aé€\ufffd"
