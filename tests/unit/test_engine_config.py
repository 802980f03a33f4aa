"""Settings that the user left open, and those that cannot work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pilotfish.attention import KVShape
from pilotfish.config import EngineConfig
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
        ({"max_num_seqs": 600}, "max_num_batched_tokens=512 is below max_num_seqs=600"),
    ],
)
def test_settings_that_cannot_work_are_refused_where_they_are_written(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_more_threads_than_cpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads=1000: this process may use"):
        load_engine("smollm2-135m", EngineConfig(threads=1000))
