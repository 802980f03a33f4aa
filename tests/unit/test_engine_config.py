"""Settings that the user left open, and those that cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pilotfish.attention import KVShape
from pilotfish.config import DraftModel, Eagle, EngineConfig, Mtp, Ngram, Speculation
from pilotfish.engine.config import Machine, resolve
from pilotfish.engine.load import load_engine
from pilotfish.errors import ConfigError

KV = KVShape(num_layers=2, num_kv_heads=1, num_q_heads=2, head_dim=32, page_size=16, dtype=torch.bfloat16)
PAGE = KV.bytes_per_page


def machine(free_pages: int) -> Machine:
    return Machine(num_cpus=2, free_memory=free_pages * PAGE)


def test_the_cache_takes_its_fraction_of_free_memory_but_no_more_than_rows_can_use() -> None:
    config = EngineConfig(kv_cache_fraction=0.5, max_num_seqs=4, max_model_len=160)
    assert resolve(config, PAGE, 1024, machine(60)).kv_cache_memory == 30 * PAGE
    assert resolve(config, PAGE, 1024, machine(1000)).kv_cache_memory == 4 * 10 * PAGE


def test_a_context_that_does_not_fit_is_lowered_if_the_user_did_not_ask_for_it() -> None:
    assert resolve(EngineConfig(kv_cache_fraction=0.5), PAGE, 1024, machine(20)).max_model_len == 160
    with pytest.raises(
        ConfigError, match=r"holds 160 tokens; one request of max_model_len=1024.*Raise kv_cache_memory"
    ):
        resolve(EngineConfig(kv_cache_fraction=0.5, max_model_len=1024), PAGE, 1024, machine(20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 2048}, "max_model_len=2048 is more than the model's context of 1024"),
        ({"kv_cache_memory": 101 * PAGE}, "is more than the [0-9]+ bytes of memory that are free"),
        ({"kv_cache_memory": 10**18}, "is more than the"),
        ({"kv_cache_memory": 1}, "holds 0 tokens"),
    ],
)
def test_settings_beyond_model_or_machine_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(**settings), PAGE, 1024, machine(100))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": 0}, "threads=0"),
        ({"dtype": "float16"}, "dtype='float16': must be one of bfloat16, float32"),
        ({"page_size": 0}, "page_size=0"),
        ({"kv_cache_fraction": "x"}, "kv_cache_fraction='x'"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no'"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"max_num_seqs": None}, "max_num_seqs=None: must be an integer of at least 1"),
        ({"max_num_batched_tokens": None}, "max_num_batched_tokens=None: must be an integer of at least 1"),
        ({"page_size": None}, "page_size=None: must be an integer of at least 1"),
        ({"max_num_seqs": 600}, "max_num_batched_tokens=512 is below max_num_seqs=600"),
    ],
)
def test_settings_that_cannot_work_are_refused_where_they_are_written(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


_DRAFTS = "num_drafts={}: must be an integer from 1 to 64"
_THRESHOLD = "threshold={}: must be a number above 0 and at most 1"
_P_MIN = "p_min={}: must be a number of at least 0 and below 1"
_LOOKUP = "lookup={}: must be an integer from 0 to 32"
_DECODE_ONLY = "decode_only_batches={}: must be true or false"
_MAX_NGRAM = "max_ngram={}: must be an integer from 1 to 32"
_MIN_NGRAM = "min_ngram={}: must be an integer from 1 to 32"
_MODEL = "model={}: must be a string that is not empty: a folder, a .gguf file, a built-in name or a Hugging Face id"
_HEAD = "head={}: must be a string that is not empty: a folder or a Hugging Face id"
_LAYERS = "layers={}: must be an integer of at least 1"


@pytest.mark.parametrize(
    ("scheme", "settings", "message"),
    [
        *[(Ngram, {"num_drafts": value}, _DRAFTS) for value in (None, True, "4", 2.0, 0, 65)],
        *[(Ngram, {"threshold": value}, _THRESHOLD) for value in ("x", None, True, 0.0, 1.5, float("nan"))],
        *[(Ngram, {"decode_only_batches": value}, _DECODE_ONLY) for value in ("no", None, 1)],
        *[(Ngram, {"max_ngram": value}, _MAX_NGRAM) for value in (None, False, 0, 33, 512)],
        *[(Ngram, {"min_ngram": value}, _MIN_NGRAM) for value in (None, "2", 0, 33)],
        *[(DraftModel, {"model": value}, _MODEL) for value in (5, "", Path("draft"), True)],
        *[(DraftModel, {"layers": value}, _LAYERS) for value in ("2", 0, True)],
        *[(scheme, {"head": value}, _HEAD) for scheme in (Mtp, Eagle) for value in (5, "", Path("head"))],
        (Mtp, {"allow_mismatch": None}, "allow_mismatch={}: must be true or false"),
        *[(Mtp, {"lookup": value}, _LOOKUP) for value in (None, "2", True, -1, 33)],
        *[(scheme, {"p_min": value}, _P_MIN) for scheme in (Mtp, Eagle) for value in ("0", None, True, -0.1, 1.0)],
    ],
)
def test_a_schemes_setting_is_refused_with_its_name_its_value_and_what_is_allowed(
    scheme: type[Speculation], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        scheme(**settings)
    (value,) = settings.values()
    assert str(caught.value).startswith(message.format(repr(value)))


def test_the_bounds_of_a_schemes_settings_are_allowed() -> None:
    for n in (1, 32):
        assert Ngram(min_ngram=n, max_ngram=n).max_ngram == n
    assert [Ngram(num_drafts=n, threshold=1).num_drafts for n in (1, 64)] == [1, 64]


def test_a_shortest_run_above_the_longest_is_named_as_what_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        Ngram(min_ngram=5)
    assert str(caught.value) == "min_ngram=5: must be at most max_ngram=4; raise max_ngram or lower min_ngram"


def test_more_threads_than_cpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads=1000: this process may use"):
        load_engine("smollm2-135m", EngineConfig(threads=1000))
