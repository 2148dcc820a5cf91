"""Types of the native module. _A result is of query's library."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, final, overload

__all__ = ["Cache", "__version__", "explain", "heatmap_page", "levels", "merge", "rope", "sdpa", "sdpa_backward",
           "weights"]

__version__: str

_A = TypeVar("_A")
_Causal: TypeAlias = Literal["top_left", "bottom_right"] | int
_Window: TypeAlias = Sequence[int | None]

@overload
def sdpa(
    query: _A, key: Any, value: Any,
    attn_mask: Any | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, causal: _Causal | None = None, window: _Window | None = None,
    softcap: float | None = None, temperature: float | None = None, sinks: Any | None = None,
    alibi: Any | bool | None = None, kv_lens: Any | None = None, kv_starts: Any | None = None,
    q_lens: Any | None = None, block_mask: tuple[Any, int, int] | None = None,
    cu_seqlens_q: Any | None = None, cu_seqlens_k: Any | None = None, seed: int | None = None,
    precision: Literal["exact", "fast"] = "exact", reproducible: bool = False, return_lse: Literal[False] = False,
    out: Any | None = None, threads: int | None = None,
    level: str | None = None,
) -> _A: ...
@overload
def sdpa(
    query: _A, key: Any, value: Any,
    attn_mask: Any | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, causal: _Causal | None = None, window: _Window | None = None,
    softcap: float | None = None, temperature: float | None = None, sinks: Any | None = None,
    alibi: Any | bool | None = None, kv_lens: Any | None = None, kv_starts: Any | None = None,
    q_lens: Any | None = None, block_mask: tuple[Any, int, int] | None = None,
    cu_seqlens_q: Any | None = None, cu_seqlens_k: Any | None = None, seed: int | None = None,
    precision: Literal["exact", "fast"] = "exact", reproducible: bool = False, return_lse: Literal[True],
    out: Any | None = None, threads: int | None = None,
    level: str | None = None,
) -> tuple[_A, _A]: ...
@overload
def sdpa(
    query: _A, key: Any, value: Any,
    attn_mask: Any | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, causal: _Causal | None = None, window: _Window | None = None,
    softcap: float | None = None, temperature: float | None = None, sinks: Any | None = None,
    alibi: Any | bool | None = None, kv_lens: Any | None = None, kv_starts: Any | None = None,
    q_lens: Any | None = None, block_mask: tuple[Any, int, int] | None = None,
    cu_seqlens_q: Any | None = None, cu_seqlens_k: Any | None = None, seed: int | None = None,
    precision: Literal["exact", "fast"] = "exact", reproducible: bool = False, return_lse: bool,
    out: Any | None = None, threads: int | None = None,
    level: str | None = None,
) -> _A | tuple[_A, _A]: ...
def weights(
    query: _A, key: Any, value: Any,
    attn_mask: Any | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, causal: _Causal | None = None, window: _Window | None = None,
    softcap: float | None = None, temperature: float | None = None, sinks: Any | None = None,
    alibi: Any | bool | None = None, kv_lens: Any | None = None, kv_starts: Any | None = None,
    q_lens: Any | None = None, block_mask: tuple[Any, int, int] | None = None,
    cu_seqlens_q: Any | None = None, cu_seqlens_k: Any | None = None, seed: int | None = None,
    precision: Literal["exact", "fast"] = "exact", reproducible: bool = False, threads: int | None = None,
    level: str | None = None,
) -> _A: ...
def explain(
    query: Any, key: Any, value: Any,
    attn_mask: Any | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, causal: _Causal | None = None, window: _Window | None = None,
    softcap: float | None = None, temperature: float | None = None, sinks: Any | None = None,
    alibi: Any | bool | None = None, kv_lens: Any | None = None, kv_starts: Any | None = None,
    q_lens: Any | None = None, block_mask: tuple[Any, int, int] | None = None,
    cu_seqlens_q: Any | None = None, cu_seqlens_k: Any | None = None, seed: int | None = None,
    precision: Literal["exact", "fast"] = "exact", reproducible: bool = False, gradients: bool = False,
    threads: int | None = None, level: str | None = None,
) -> str: ...
def sdpa_backward(
    grad_out: Any, query: _A, key: Any, value: Any, out: Any, lse: Any,
    attn_mask: Any | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, causal: _Causal | None = None, window: _Window | None = None,
    softcap: float | None = None, temperature: float | None = None, sinks: Any | None = None,
    alibi: Any | bool | None = None, kv_lens: Any | None = None, kv_starts: Any | None = None,
    q_lens: Any | None = None, block_mask: tuple[Any, int, int] | None = None,
    cu_seqlens_q: Any | None = None, cu_seqlens_k: Any | None = None, seed: int | None = None,
    precision: Literal["exact", "fast"] = "exact", reproducible: bool = False, return_dmask: bool = False,
    threads: int | None = None, level: str | None = None,
) -> tuple[Any, ...]: ...
def merge(parts: Iterable[Sequence[_A]]) -> tuple[_A, _A]: ...
def rope(
    x: _A, positions: Any = 0, *, base: float = 10000.0, pairing: Literal["half", "interleaved"] = "half",
    rotary_dim: int | None = None, out: Any | None = None,
) -> _A: ...
def levels() -> list[str]: ...
def heatmap_page(
    layers: Any, texts: Any, attn_mask: Any | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, **options: Any,
) -> str: ...

@final
class Cache:
    def __new__(
        cls, batch: int, kv_heads: int, head_dim: int, value_dim: int | None = None, *, capacity: int | None = None,
        window: int | None = None, sink_tokens: int | None = None,
        pages: int | None = None, page_size: int | None = None,
        dtype: Literal["float32", "float16", "bfloat16", "int8", "q8_0", "q4_0", "float8_e4m3fn", "float8_e5m2"] | Any
        = "float32",
    ) -> Cache: ...
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
        self, query: _A, *, q_lens: Any | None = None, scale: float | None = None,
        window: _Window | None = None, softcap: float | None = None, temperature: float | None = None,
        sinks: Any | None = None, alibi: Any | bool | None = None, out: Any | None = None,
        threads: int | None = None, level: str | None = None, return_lse: Literal[False] = False,
    ) -> _A: ...
    @overload
    def decode(
        self, query: _A, *, q_lens: Any | None = None, scale: float | None = None,
        window: _Window | None = None, softcap: float | None = None, temperature: float | None = None,
        sinks: Any | None = None, alibi: Any | bool | None = None, out: Any | None = None,
        threads: int | None = None, level: str | None = None, return_lse: Literal[True],
    ) -> tuple[_A, _A]: ...
    @overload
    def decode(
        self, query: _A, *, q_lens: Any | None = None, scale: float | None = None,
        window: _Window | None = None, softcap: float | None = None, temperature: float | None = None,
        sinks: Any | None = None, alibi: Any | bool | None = None, out: Any | None = None,
        threads: int | None = None, level: str | None = None, return_lse: bool,
    ) -> _A | tuple[_A, _A]: ...
    @overload
    def prefill(
        self, query: _A, key: Any, value: Any, *, scale: float | None = None,
        window: _Window | None = None, softcap: float | None = None, temperature: float | None = None,
        sinks: Any | None = None, alibi: Any | bool | None = None, out: Any | None = None,
        threads: int | None = None, level: str | None = None, return_lse: Literal[False] = False,
    ) -> _A: ...
    @overload
    def prefill(
        self, query: _A, key: Any, value: Any, *, scale: float | None = None,
        window: _Window | None = None, softcap: float | None = None, temperature: float | None = None,
        sinks: Any | None = None, alibi: Any | bool | None = None, out: Any | None = None,
        threads: int | None = None, level: str | None = None, return_lse: Literal[True],
    ) -> tuple[_A, _A]: ...
    @overload
    def prefill(
        self, query: _A, key: Any, value: Any, *, scale: float | None = None,
        window: _Window | None = None, softcap: float | None = None, temperature: float | None = None,
        sinks: Any | None = None, alibi: Any | bool | None = None, out: Any | None = None,
        threads: int | None = None, level: str | None = None, return_lse: bool,
    ) -> _A | tuple[_A, _A]: ...
