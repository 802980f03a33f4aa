"""From what the user asked and what model and machine are, to settings without a None."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from pilotfish.config import EngineConfig
from pilotfish.errors import ConfigError

__all__ = ["Machine", "resolve"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Machine:
    """What matters of this machine: CPUs this process may use, and bytes of memory that are free."""

    num_cpus: int
    free_memory: int

    @classmethod
    def detect(cls) -> Machine:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(num_cpus=cpus, free_memory=_free_memory())


def _free_memory() -> int:
    """Free memory in bytes: the system's, or what this process's control group leaves of it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control groups here: the system's number stands
    return max(free, 0)


def resolve(config: EngineConfig, page_bytes: int, context_len: int, machine: Machine) -> EngineConfig:
    """Decide every setting that the user left open. Pure but for logging each decision.

    Args:
        config: as the user wrote it.
        page_bytes: bytes of a KV page over all layers, of target and draft.
        context_len: the model's longest sequence, in tokens.
        machine: what the decision depends on; its memory after the weights were loaded.

    Raises:
        ConfigError: a setting asks for more than the model or the memory has.
    """
    max_model_len = config.max_model_len or context_len
    if max_model_len > context_len:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the model's context of {context_len} tokens. "
            f"Lower max_model_len to at most {context_len}."
        )
    memory = config.kv_cache_memory
    if memory is not None and memory > machine.free_memory:
        raise ConfigError(
            f"kv_cache_memory={memory} bytes is more than the {machine.free_memory} bytes of memory that are free. "
            "Lower it, or leave it out to take a part of what is free."
        )
    if memory is None:
        most = config.max_num_seqs * -(-max_model_len // config.page_size) * page_bytes
        memory = min(int(config.kv_cache_fraction * machine.free_memory), most)
        logger.info(
            "kv_cache_memory=%d: %s", memory,
            "enough for every row's full context" if memory == most
            else f"{config.kv_cache_fraction:g} of the {machine.free_memory} bytes that are free",
        )  # fmt: skip
    pages = memory // page_bytes
    fits = pages * config.page_size
    if fits < max_model_len:
        if config.max_model_len is not None or fits < 2:
            raise ConfigError(
                f"The KV cache of {memory} bytes holds {fits} tokens; one request of max_model_len={max_model_len} "
                f"tokens needs {-(-max_model_len // config.page_size) * page_bytes} bytes. "
                f"Raise kv_cache_memory or lower max_model_len."
            )
        logger.warning("max_model_len=%d, not the model's %d: the KV cache holds no more", fits, max_model_len)
        max_model_len = fits
    return replace(config, max_model_len=max_model_len, kv_cache_memory=memory)
