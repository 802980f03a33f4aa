"""Types of the C++ extension (native/module.cpp). Addresses are ``Tensor.data_ptr()``; strides count elements."""

import numpy as np
from numpy.typing import NDArray

def supported_isas() -> list[str]:
    """Instruction sets whose kernels run on this machine, worst to best; empty where none does."""

def fast_dpbf16() -> bool:
    """Whether this CPU's bf16 dot product is faster than the two multiply-adds that it replaces."""

class Team:
    """Threads that run kernels: the caller and ``num_threads - 1`` workers, which spin ``spin_us`` before they sleep.

    May be used from several Python threads (one call at a time runs); not across a fork.
    """

    def __init__(self, num_threads: int, spin_us: int = 100) -> None: ...
    @property
    def num_threads(self) -> int: ...

class HugeBuffer:
    """Zeroed memory in huge pages, where the system gives them. Raises MemoryError."""

    def __init__(self, num_bytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def array(self) -> NDArray[np.uint8]:
        """The whole buffer as an array that keeps it alive."""

class Arena:
    """Memory for packed weights."""

    def __init__(self) -> None: ...

class PackedLinear:
    """A [n, k] weight in the kernels' layout, and its bias."""

    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...

def pack_linear(
    arena: Arena,
    team: Team,
    source: int,
    src_dtype: str,
    n: int,
    k: int,
    row_stride: int,
    dst_dtype: str,
    bias: int = 0,
) -> PackedLinear:
    """Pack a [n, k] weight (``float32`` or ``bfloat16``) and copy its float32 bias (address, or 0 for none)."""

def read_all(team: Team, buffer: HugeBuffer) -> int:
    """Read the buffer once on all threads: what a memory-bound kernel can at best do."""

class Batch:
    """Addresses of a ForwardBatch's arrays. They are read when a program runs."""

    def __init__(self) -> None: ...
    def set_arrays(
        self, positions: int, slots: int, query_start: int, kv_len: int, page_start: int, pages: int
    ) -> None: ...
    def set_tree(self, mask: int, words: int) -> None: ...
    def set_size(self, num_tokens: int, num_seqs: int) -> None: ...

class KVLayer:
    """One layer's KV pages (layout: native/kernels.h)."""

    def __init__(
        self,
        dtype: str,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        d_pad: int,
        page_size: int,
        k: int,
        v: int,
        first_key: int = 0,
    ) -> None: ...

def attention_scratch_bytes(layer: KVLayer, max_tokens: int, max_seqs: int, max_kv_len: int, num_threads: int) -> int:
    """Bytes of scratch memory that ``Program.attention`` needs for batches up to these sizes."""

class Program:
    """A list of kernel calls that ``run`` replays for any number of rows, with a barrier after each.

    Addresses given to a command, and Batch and KVLayer objects, must stay valid while the program lives.
    """

    def __init__(self, team: Team, isa: str) -> None: ...
    def __len__(self) -> int: ...
    def run(self, rows: int) -> None:
        """Replay all commands. Releases the GIL."""
    @property
    def native_ns(self) -> int:
        """Nanoseconds spent in ``run`` so far."""
    @property
    def profile_ns(self) -> dict[str, int]:
        """Nanoseconds by kind of command since profiling was last switched on."""
    def set_profile(self, on: bool) -> None:
        """Measure every command from now on, or no longer."""
    def linear(self, x: int, x_stride: int, weight: PackedLinear, y: int, y_stride: int, y_dtype: str) -> None: ...
    def embedding(self, token_ids: int, table: PackedLinear, out: int, out_stride: int) -> None: ...
    def rms_norm(
        self,
        dtype: str,
        x: int,
        x_stride: int,
        weight: int,
        out: int,
        out_stride: int,
        groups: int,
        dim: int,
        eps: float,
    ) -> None: ...
    def add_rms_norm(
        self,
        dtype: str,
        x: int,
        x_stride: int,
        residual: int,
        residual_stride: int,
        weight: int,
        out: int,
        out_stride: int,
        dim: int,
        eps: float,
    ) -> None: ...
    def add(
        self,
        dtype: str,
        x: int,
        x_stride: int,
        residual: int,
        residual_stride: int,
        out: int,
        out_stride: int,
        dim: int,
    ) -> None: ...
    def concat(
        self, dtype: str, xs: list[int], x_strides: list[int], dims: list[int], out: int, out_stride: int
    ) -> None: ...
    def silu_mul(self, dtype: str, gate_up: int, stride: int, out: int, out_stride: int, dim: int) -> None: ...
    def gather_rows(
        self, dtype: str, x: int, x_stride: int, index: int, out: int, out_stride: int, dim: int
    ) -> None: ...
    def rope_append(
        self,
        batch: Batch,
        layer: KVLayer,
        q: int,
        q_stride: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        cos: int,
        sin: int,
    ) -> None: ...
    def attention(
        self,
        batch: Batch,
        layer: KVLayer,
        q: int,
        q_stride: int,
        out: int,
        out_stride: int,
        scale: float,
        scratch: int,
    ) -> None: ...
    def copy_slots(self, layer: KVLayer, source: int, target: int) -> None: ...
    def argmax(self, logits: int, stride: int, vocab: int, out: int) -> None: ...
    def noise_argmax(
        self,
        logits: int,
        stride: int,
        vocab: int,
        inv_temperature: int,
        seeds: int,
        sample_indices: int,
        positions: int,
        out: int,
    ) -> None: ...
