"""Types of `attn`. A result is of query's library."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, overload

from ._heatmap import Heatmap as Heatmap, heatmap as heatmap

__all__ = ["Cache", "Heatmap", "__version__", "explain", "heatmap", "levels", "merge", "rope", "sdpa", "sdpa_backward",
           "weights"]

__version__: str

A = TypeVar("A")
_Causal: TypeAlias = Literal["top_left", "bottom_right"] | int
_Window: TypeAlias = Sequence[int | None]

@overload
def sdpa(
    query: A, key: Any, value: Any,
    attn_mask: Any | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, causal: _Causal | None = None, window: _Window | None = None,
    softcap: float | None = None, temperature: float | None = None, sinks: Any | None = None,
    alibi: Any | bool | None = None, kv_lens: Any | None = None, kv_starts: Any | None = None,
    q_lens: Any | None = None, block_mask: tuple[Any, int, int] | None = None,
    cu_seqlens_q: Any | None = None, cu_seqlens_k: Any | None = None, seed: int | None = None,
    precision: Literal["exact", "fast"] = "exact", reproducible: bool = False, return_lse: Literal[False] = False,
    out: Any | None = None, threads: int | None = None,
    level: str | None = None,
) -> A: ...
@overload
def sdpa(
    query: A, key: Any, value: Any,
    attn_mask: Any | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, causal: _Causal | None = None, window: _Window | None = None,
    softcap: float | None = None, temperature: float | None = None, sinks: Any | None = None,
    alibi: Any | bool | None = None, kv_lens: Any | None = None, kv_starts: Any | None = None,
    q_lens: Any | None = None, block_mask: tuple[Any, int, int] | None = None,
    cu_seqlens_q: Any | None = None, cu_seqlens_k: Any | None = None, seed: int | None = None,
    precision: Literal["exact", "fast"] = "exact", reproducible: bool = False, return_lse: Literal[True],
    out: Any | None = None, threads: int | None = None,
    level: str | None = None,
) -> tuple[A, A]: ...
@overload
def sdpa(query: A, key: Any, value: Any, attn_mask: Any | None = None, *arguments: Any,
         return_lse: bool, **options: Any) -> A | tuple[A, A]: ...
def weights(
    query: A, key: Any, value: Any,
    attn_mask: Any | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, causal: _Causal | None = None, window: _Window | None = None,
    softcap: float | None = None, temperature: float | None = None, sinks: Any | None = None,
    alibi: Any | bool | None = None, kv_lens: Any | None = None, kv_starts: Any | None = None,
    q_lens: Any | None = None, block_mask: tuple[Any, int, int] | None = None,
    cu_seqlens_q: Any | None = None, cu_seqlens_k: Any | None = None, seed: int | None = None,
    precision: Literal["exact", "fast"] = "exact", reproducible: bool = False, threads: int | None = None,
    level: str | None = None,
) -> A: ...
def explain(
    query: Any, key: Any, value: Any,
    attn_mask: Any | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, causal: _Causal | None = None, window: _Window | None = None,
    softcap: float | None = None, temperature: float | None = None, sinks: Any | None = None,
    alibi: Any | bool | None = None, kv_lens: Any | None = None, kv_starts: Any | None = None,
    q_lens: Any | None = None, block_mask: tuple[Any, int, int] | None = None,
    cu_seqlens_q: Any | None = None, cu_seqlens_k: Any | None = None, seed: int | None = None,
    precision: Literal["exact", "fast"] = "exact", reproducible: bool = False, threads: int | None = None,
    level: str | None = None,
) -> str: ...
def sdpa_backward(
    grad_out: Any, query: A, key: Any, value: Any, out: Any, lse: Any,
    attn_mask: Any | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, causal: _Causal | None = None, window: _Window | None = None,
    softcap: float | None = None, temperature: float | None = None, sinks: Any | None = None,
    alibi: Any | bool | None = None, kv_lens: Any | None = None, kv_starts: Any | None = None,
    q_lens: Any | None = None, block_mask: tuple[Any, int, int] | None = None,
    cu_seqlens_q: Any | None = None, cu_seqlens_k: Any | None = None, seed: int | None = None,
    precision: Literal["exact", "fast"] = "exact", reproducible: bool = False, return_dmask: bool = False,
    threads: int | None = None, level: str | None = None,
) -> tuple[Any, ...]: ...
def merge(parts: Iterable[Sequence[A]]) -> tuple[A, A]: ...
def rope(
    x: A, positions: Any = 0, *, base: float = 10000.0, pairing: Literal["half", "interleaved"] = "half",
    rotary_dim: int | None = None, out: Any | None = None,
) -> A: ...
def levels() -> list[str]: ...

class Cache:
    def __init__(
        self, batch: int, kv_heads: int, head_dim: int, value_dim: int | None = None, *, capacity: int | None = None,
        window: int | None = None, sink_tokens: int | None = None,
        pages: int | None = None, page_size: int | None = None,
        dtype: Literal["float32", "float16", "bfloat16", "int8", "q8_0", "q4_0", "float8_e4m3fn", "float8_e5m2"] | Any
        = "float32",
    ) -> None: ...
    @property
    def lens(self) -> list[int]: ...
    @property
    def capacity(self) -> int: ...
    @property
    def block_table(self) -> list[list[int]] | None: ...
    @property
    def free_pages(self) -> int | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    def append(self, key: Any, value: Any, counts: Any | None = None) -> None: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def __copy__(self) -> Cache: ...
    def __deepcopy__(self, _memo: Any) -> Cache: ...
    @overload
    def decode(
        self, query: A, *, q_lens: Any | None = None, scale: float | None = None,
        window: _Window | None = None, softcap: float | None = None, temperature: float | None = None,
        sinks: Any | None = None, alibi: Any | bool | None = None, out: Any | None = None,
        threads: int | None = None, level: str | None = None, return_lse: Literal[False] = False,
    ) -> A: ...
    @overload
    def decode(
        self, query: A, *, q_lens: Any | None = None, scale: float | None = None,
        window: _Window | None = None, softcap: float | None = None, temperature: float | None = None,
        sinks: Any | None = None, alibi: Any | bool | None = None, out: Any | None = None,
        threads: int | None = None, level: str | None = None, return_lse: Literal[True],
    ) -> tuple[A, A]: ...
    @overload
    def decode(self, query: A, *, return_lse: bool, **options: Any) -> A | tuple[A, A]: ...
    @overload
    def prefill(
        self, query: A, key: Any, value: Any, *, scale: float | None = None,
        window: _Window | None = None, softcap: float | None = None, temperature: float | None = None,
        sinks: Any | None = None, alibi: Any | bool | None = None, out: Any | None = None,
        threads: int | None = None, level: str | None = None, return_lse: Literal[False] = False,
    ) -> A: ...
    @overload
    def prefill(
        self, query: A, key: Any, value: Any, *, scale: float | None = None,
        window: _Window | None = None, softcap: float | None = None, temperature: float | None = None,
        sinks: Any | None = None, alibi: Any | bool | None = None, out: Any | None = None,
        threads: int | None = None, level: str | None = None, return_lse: Literal[True],
    ) -> tuple[A, A]: ...
    @overload
    def prefill(self, query: A, key: Any, value: Any, *, return_lse: bool, **options: Any) -> A | tuple[A, A]: ...
