"""Exact attention on NumPy arrays through libattn, by ctypes: no compiler, no copy.

    import attn_ctypes
    attn_ctypes.load("target/dist/lib/libattn.so")
    out = attn_ctypes.sdpa(q, k, v, causal="bottom_right")

    out, lse = attn_ctypes.sdpa(q, k, v, causal="bottom_right", return_lse=True)
    dq, dk, dv = attn_ctypes.sdpa_backward(q, k, v, out, lse, dout, causal="bottom_right")

    cache = attn_ctypes.Cache(k_slots, v_slots)  # your arrays; also rings and pages
    cache.append(k_new, v_new)
    out = cache.decode(q)

Arrays are [batch, heads, seq, dim] with any strides: a transposed, sliced or reversed view is read where it lies. float32 and
float16 are taken by their own dtype, bfloat16 as uint16 bits with dtype="bf16". Run as a program, this file compares the
library with the formula written in NumPy:

    python3 attn_ctypes.py target/dist/lib/libattn.so
"""

import ctypes
import sys

import numpy as np

_SIZE, _DIFF, _U32, _F64, _PTR = ctypes.c_size_t, ctypes.c_ssize_t, ctypes.c_uint32, ctypes.c_double, ctypes.c_void_p
_F32, _F16, _BF16, _DOUBLE, _BOOL = 1, 2, 3, 4, 5
_PRECISION = {"exact": 0, "fast": 1}
_ALIGN = {None: 0, "top_left": 1, "bottom_right": 2}
_UNBOUNDED = 2 ** (8 * ctypes.sizeof(_SIZE)) - 1


class _Tensor(ctypes.Structure):
    _fields_ = [("struct_size", _SIZE), ("data", _PTR), ("len", _SIZE), ("shape", _SIZE * 4), ("strides", _DIFF * 4),
                ("offset", _SIZE), ("dtype", _U32), ("reserved", _U32)]


class _Options(ctypes.Structure):
    """AttnOptions up to its bias: what lies behind is zero to the library, because struct_size says so."""
    _fields_ = [("struct_size", _SIZE), ("threads", _SIZE), ("level", ctypes.c_char_p), ("scale", _F64), ("softcap", _F64),
                ("temperature", _F64), ("has_scale", _U32), ("precision", _U32), ("causal", _U32), ("window", _U32),
                ("causal_offset", _DIFF), ("window_offset", _DIFF), ("window_left", _SIZE), ("window_right", _SIZE),
                ("prefix", _U32), ("reserved", _U32), ("prefix_offset", _DIFF), ("prefix_lens", _PTR), ("prefix_lens_len", _SIZE),
                ("kv_lens", _PTR), ("kv_lens_len", _SIZE), ("kv_starts", _PTR), ("kv_starts_len", _SIZE),
                ("q_lens", _PTR), ("q_lens_len", _SIZE), ("cu_q", _PTR), ("cu_q_len", _SIZE), ("cu_k", _PTR),
                ("cu_k_len", _SIZE), ("document_causal", _U32), ("document_window", _U32),
                ("document_causal_offset", _DIFF), ("document_window_offset", _DIFF), ("document_window_left", _SIZE),
                ("document_window_right", _SIZE), ("blocks", _PTR), ("block_q", _SIZE), ("block_k", _SIZE),
                ("tree_parents", _PTR), ("tree_len", _SIZE), ("keep", ctypes.POINTER(_Tensor)),
                ("drop", ctypes.POINTER(_Tensor)), ("bias", ctypes.POINTER(_Tensor))]


class _Cache(ctypes.Structure):
    _fields_ = [("struct_size", _SIZE), ("kind", _U32), ("reserved", _U32), ("k", ctypes.POINTER(_Tensor)),
                ("v", ctypes.POINTER(_Tensor)), ("lens", _PTR), ("lens_len", _SIZE), ("sinks", _SIZE), ("window", _SIZE),
                ("block_table", _PTR), ("block_table_len", _SIZE)]


class _Queries(ctypes.Structure):
    _fields_ = [("struct_size", _SIZE), ("lens", _PTR), ("lens_len", _SIZE), ("cu", _PTR), ("cu_len", _SIZE)]


class _Gradients(ctypes.Structure):
    _fields_ = [("struct_size", _SIZE), ("dq", ctypes.POINTER(_Tensor)), ("dk", ctypes.POINTER(_Tensor)),
                ("dv", ctypes.POINTER(_Tensor)), ("dsinks", _PTR), ("dsinks_len", _SIZE),
                ("dbias", ctypes.POINTER(_Tensor)), ("score_mod_derivative", _PTR)]


class AttnError(ValueError):
    """What the library refused; nothing has been written."""


def _dtype(array, halves):
    """The library's number for an array's type; `halves` says what uint16 bits are."""
    if not isinstance(array, np.ndarray):
        found = f"{type(array).__module__}.{type(array).__name__}"
        raise TypeError(f"{found} is no NumPy array (of a torch tensor, pass tensor.numpy())")
    if not array.dtype.isnative:
        raise TypeError(f"{array.dtype} is not in this machine's byte order")
    if array.dtype == np.uint16:
        if halves not in ("bf16", "f16"):
            raise TypeError('uint16 arrays hold halves as bits: say dtype="bf16" or dtype="f16"')
        return _BF16 if halves == "bf16" else _F16
    known = {"float32": _F32, "float16": _F16, "float64": _DOUBLE, "bool": _BOOL}
    if array.dtype.name not in known:
        raise TypeError(f"attention on {array.dtype} is not supported")
    return known[array.dtype.name]


def _tensor(array, name, halves, also=()):
    """Describes an array of four axes in place; `also` holds number types that it may have beside f32, f16 and bf16."""
    dtype = _dtype(array, halves)
    if dtype not in (_F32, _F16, _BF16, *also):
        raise TypeError(f'{name} is {array.dtype}; it must be float32, float16 or bfloat16 (uint16 bits with dtype="bf16")')
    if array.ndim != 4:
        raise ValueError(f"{name} has {array.ndim} axes; [batch, heads, seq, dim] are wanted")
    item, tensor = array.itemsize, _Tensor(ctypes.sizeof(_Tensor), dtype=dtype)
    tensor.shape[:] = array.shape
    if array.size == 0:
        return tensor
    if any(n > 1 and stride % item for n, stride in zip(array.shape, array.strides)):
        raise ValueError(f"{name}: strides {array.strides} are not whole elements")
    tensor.strides[:] = [stride // item if n > 1 else 0 for n, stride in zip(array.shape, array.strides)]
    reach = [(n - 1) * stride for n, stride in zip(array.shape, tensor.strides)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    tensor.data, tensor.offset, tensor.len = array.ctypes.data + low * item, -low, high - low + 1
    return tensor


def _table(array):
    """Address and length, of None too."""
    return (None, 0) if array is None else (array.ctypes.data, array.size)


def _lengths(values, name):
    """A contiguous array of size_t; one that is such an array already is used as it is."""
    if values is None:
        return None
    array = np.asarray(values)
    if array.dtype.kind not in "iu" or array.size and array.min() < 0:
        raise TypeError(f"{name} must be integers of at least 0")
    return np.ascontiguousarray(array, np.uintp)


def _options(causal, scale, mask, softcap, window, threads, precision, dtype):
    """The options of a call; they keep what they point to."""
    if causal not in _ALIGN:
        raise ValueError(f'causal is {causal!r}; it may be None, "top_left" or "bottom_right"')
    if threads < 0:
        raise ValueError(f"threads is {threads}; 0 takes all")
    if precision not in _PRECISION:
        raise ValueError(f'precision is {precision!r}; it may be "exact" or "fast"')
    options = _Options(ctypes.sizeof(_Options), threads=threads, causal=_ALIGN[causal], precision=_PRECISION[precision])
    if scale is not None:
        options.has_scale, options.scale = 1, scale
    if softcap is not None:
        options.softcap = softcap
    if window is not None:
        sides = (window, window) if isinstance(window, int) else window
        if any(side is not None and side < -1 for side in sides):
            raise ValueError(f"window is {window!r}; a side is a distance, or None or -1 for no bound")
        left, right = (_UNBOUNDED if side is None or side < 0 else side for side in sides)
        options.window, options.window_left, options.window_right = _ALIGN[causal or "bottom_right"], left, right
    if mask is not None:
        mask = np.asarray(mask)
        mask = mask[(np.newaxis,) * (4 - mask.ndim)] if mask.ndim < 4 else mask
        given = _tensor(mask, "mask", dtype, also=(_DOUBLE, _BOOL))
        field = "keep" if given.dtype == _BOOL else "bias"
        setattr(options, field, ctypes.pointer(given))
    return options


class Library:
    """A loaded libattn."""

    def __init__(self, path):
        self._lib = ctypes.CDLL(str(path))
        for name in ("attn_version", "attn_levels", "attn_last_error"):
            getattr(self._lib, name).restype = ctypes.c_char_p
        tensor = ctypes.POINTER(_Tensor)
        options, cache = ctypes.POINTER(_Options), ctypes.POINTER(_Cache)
        self._lib.attn_forward.argtypes = [options, tensor, tensor, tensor, tensor, _PTR, _SIZE]
        self._lib.attn_backward.argtypes = [options, *[tensor] * 4, _PTR, _SIZE, tensor, ctypes.POINTER(_Gradients)]
        self._lib.attn_decode.argtypes = [options, cache, tensor, ctypes.POINTER(_Queries), tensor, _PTR, _SIZE]
        self._lib.attn_cache_append.argtypes = [cache, tensor, tensor, _PTR, _SIZE]
        self.version = self._lib.attn_version().decode()
        self.levels = self._lib.attn_levels().decode().split()

    def sdpa(self, q, k, v, *, causal=None, scale=None, mask=None, softcap=None, window=None, threads=0,
             precision="exact", dtype=None, return_lse=False, out=None):
        """softmax(scale * q @ k.T + mask) @ v; see the module's sdpa()."""
        options = _options(causal, scale, mask, softcap, window, threads, precision, dtype)
        tensors = [_tensor(array, name, dtype) for array, name in ((q, "q"), (k, "k"), (v, "v"))]
        shape = (*q.shape[:3], v.shape[3])
        if out is None:
            out = np.empty(shape, q.dtype)
        elif not out.flags.writeable:
            raise ValueError("out is read-only")
        tensors.append(_tensor(out, "out", dtype))
        lse = np.empty(shape[:3], np.float32) if return_lse else None
        self._check(self._lib.attn_forward(options, *tensors, *_table(lse)))
        return (out, lse) if return_lse else out

    def sdpa_backward(self, q, k, v, out, lse, dout, *, causal=None, scale=None, mask=None, softcap=None, window=None,
                      threads=0, precision="exact", dtype=None, return_dmask=False):
        """Gradients of q, k and v; see the module's sdpa_backward()."""
        options = _options(causal, scale, mask, softcap, window, threads, precision, dtype)
        named = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
        given = [_tensor(array, name, dtype) for name, array in named.items()]
        if not isinstance(lse, np.ndarray) or lse.dtype != np.float32:
            raise TypeError("lse must be the float32 array that sdpa(..., return_lse=True) returned")
        lse = np.ascontiguousarray(lse)
        found = [np.empty(array.shape, array.dtype) for array in (q, k, v)]
        to = [_tensor(array, name, dtype) for array, name in zip(found, ("dq", "dk", "dv"))]
        gradients = _Gradients(ctypes.sizeof(_Gradients), *(ctypes.pointer(tensor) for tensor in to))
        if return_dmask:
            mask = np.asarray(mask)
            if mask.dtype.kind != "f" and mask.dtype != np.uint16:
                raise TypeError("only a mask of numbers has a gradient")
            found.append(np.empty(mask.shape, np.float64))
            dmask = found[3][(np.newaxis,) * (4 - mask.ndim)]
            gradients.dbias = ctypes.pointer(_tensor(dmask, "dmask", dtype, also=(_DOUBLE,)))
        self._check(self._lib.attn_backward(options, *given[:4], *_table(lse), given[4], gradients))
        return tuple(found)

    def _check(self, status):
        if status:
            raise AttnError(f"{self._lib.attn_last_error().decode()} (status {status})")


class Cache:
    """Keys and values of a batch of sequences of different lengths, in arrays of yours.

    k, v      [B, Hkv, slots, D], [B, Hkv, slots, Dv]; pages with block_table: [pages, Hkv, page_size, D]
    lens      tokens of each sequence, an array of np.uintp that append() adds to; None: none yet
    window    with it, and sinks, a ring: the first `sinks` tokens and the last `window` are kept, and lens counts all
    block_table  int32 [B, width]: the pages of each sequence in order
    dtype     "bf16" or "f16": what uint16 arrays are

    What holds no token is never read. load() comes first.
    """

    def __init__(self, k, v, lens=None, *, block_table=None, sinks=0, window=None, dtype=None):
        if _library is None:
            raise RuntimeError("call load(path) first")
        if not (k.flags.writeable and v.flags.writeable):
            raise ValueError("a cache's arrays must be writeable")
        self._dtype, self._library = dtype, _library
        self._keep = k, v  # alive as long as this object
        self._k, self._v = _tensor(k, "k", dtype), _tensor(v, "v", dtype)
        if block_table is not None:
            block_table = np.ascontiguousarray(block_table, np.int32)
        self._block_table = block_table
        if lens is None:
            lens = np.zeros(len(k if block_table is None else block_table), np.uintp)
        if lens.dtype != np.uintp or not lens.flags.c_contiguous:
            raise TypeError("lens must be a contiguous array of np.uintp, which append() adds to")
        self.lens = lens
        kind = 2 if block_table is not None else 1 if window is not None else 0
        self._struct = _Cache(ctypes.sizeof(_Cache), kind, 0, ctypes.pointer(self._k), ctypes.pointer(self._v),
                              *_table(lens), sinks, 0 if window is None else window, *_table(block_table))

    def append(self, k, v, counts=None):
        """Appends k, v [B, Hkv, n, D]: all n tokens to every sequence, or the first counts[b]."""
        counts = _lengths(counts, "counts")
        tensors = _tensor(k, "k", self._dtype), _tensor(v, "v", self._dtype)
        self._library._check(self._library._lib.attn_cache_append(self._struct, *tensors, *_table(counts)))

    def decode(self, q, *, q_lens=None, cu_q=None, scale=None, softcap=None, threads=0, dtype=None, return_lse=False,
               out=None):
        """Attention of the last tokens of every sequence, whose keys are in the cache already: causal, one call for all.

        q [B, Hq, Sq, D]; of sequence b only the first q_lens[b] rows are queries. Or packed, with cu_q: [1, Hq, total, D],
        sequence b at cu_q[b]:cu_q[b + 1]. Returns [B, Hq, Sq, Dv] of q's dtype, or of out's.
        """
        q_lens, cu_q = _lengths(q_lens, "q_lens"), _lengths(cu_q, "cu_q")
        if out is None:
            out = np.empty((*q.shape[:3], self._v.shape[3]), q.dtype)
        elif not out.flags.writeable:
            raise ValueError("out is read-only")
        dtype = dtype or self._dtype
        lse = np.empty(q.shape[:3], np.float32) if return_lse else None
        options = _Options(ctypes.sizeof(_Options), threads=threads, softcap=softcap or 0.0)
        if scale is not None:
            options.has_scale, options.scale = 1, scale
        queries = _Queries(ctypes.sizeof(_Queries), *_table(q_lens), *_table(cu_q))
        self._library._check(self._library._lib.attn_decode(
            options, self._struct, _tensor(q, "q", dtype), queries, _tensor(out, "out", dtype), *_table(lse)))
        return (out, lse) if return_lse else out


_library = None


def load(path):
    """Loads libattn.so; sdpa() uses it from then on. Also returns it, as a Library with a method sdpa()."""
    global _library
    _library = Library(path)
    return _library


def sdpa(q, k, v, *, causal=None, scale=None, mask=None, softcap=None, window=None, threads=0, precision="exact",
         dtype=None, return_lse=False, out=None):
    """softmax(scale * q @ k.T + mask) @ v, as torch's scaled_dot_product_attention, without a copy.

    q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv]: Hq is a multiple of Hkv, and consecutive query heads share a
    key/value head (torch's enable_gqa=True). Returns [B, Hq, Sq, Dv] of q's dtype, or of out's; with return_lse also the
    log-sum-exp of each row, float32 [B, Hq, Sq].

    causal    "top_left" (torch's is_causal=True) or "bottom_right" (the last query sees the last key: decoding with a cache)
    scale     default 1/sqrt(D)
    mask      broadcasts to [B, Hq, Sq, Skv]; bool: True is attended to; numbers are added to the scores, -inf hides
    softcap   c * tanh(score / c), before the mask
    window    (left, right): keys at these distances or nearer, None or -1 for no bound; one number means both. Queries stand
              as causal says, "bottom_right" without it
    threads   0 for all; changes no bit
    precision "exact" or "fast": faster where the hardware offers it, within the bound that the library states
    dtype     "bf16" or "f16": what uint16 arrays are
    out       written to and returned; must not share memory with the inputs

    A row that sees no key is 0, its log-sum-exp -inf. Raises AttnError before anything is written.
    """
    if _library is None:
        raise RuntimeError("call load(path) first")
    return _library.sdpa(q, k, v, causal=causal, scale=scale, mask=mask, softcap=softcap, window=window, threads=threads,
                         precision=precision, dtype=dtype, return_lse=return_lse, out=out)


def sdpa_backward(q, k, v, out, lse, dout, *, causal=None, scale=None, mask=None, softcap=None, window=None, threads=0,
                  precision="exact", dtype=None, return_dmask=False):
    """Gradients of q, k and v, each of its tensor's shape and dtype.

    out, lse  what sdpa(..., return_lse=True) returned for these inputs and options
    dout      the gradient of the loss by out, of its shape and dtype

    All else as for sdpa(). With return_dmask also that of a mask of numbers, in float64: of its shape, and summed over
    the axes along which it is broadcast.
    """
    if _library is None:
        raise RuntimeError("call load(path) first")
    return _library.sdpa_backward(q, k, v, out, lse, dout, causal=causal, scale=scale, mask=mask, softcap=softcap,
                                  window=window, threads=threads, precision=precision, dtype=dtype,
                                  return_dmask=return_dmask)


# --- What runs as a program: comparison with the formula ----------------------------------------------------------------


def _naive(q, k, v, keep, bias, scale, softcap):
    """The formula in float64."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    score = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        score = softcap * np.tanh(score / softcap)
    score = np.where(keep, score + bias, -np.inf)
    most = score.max(axis=3, keepdims=True, initial=-np.inf)
    weight = np.exp(score - np.where(np.isinf(most), 0, most))
    total = weight.sum(axis=3, keepdims=True)
    with np.errstate(divide="ignore"):
        return weight @ v / np.where(total == 0, 1, total), (np.log(total) + most)[..., 0]


def _naive_backward(q, k, v, dout, keep, bias, scale):
    """The gradients of the formula in float64, without a soft-cap; the last one is that of the mask."""
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5 if scale is None else scale
    wide = [np.repeat(x, group, axis=1) for x in (k, v)]
    out, lse = _naive(q, k, v, keep, bias, scale, None)
    score = np.where(keep, q @ wide[0].swapaxes(2, 3) * scale + bias, -np.inf)
    weight = np.exp(score - np.where(np.isinf(lse), 0, lse)[..., None])
    by_mask = weight * (dout @ wide[1].swapaxes(2, 3) - (out * dout).sum(axis=3, keepdims=True))
    shared = tuple(n for n, size in enumerate((1,) * (4 - bias.ndim) + bias.shape) if size == 1)
    summed = lambda x: x.reshape(len(x), -1, group, *x.shape[2:]).sum(axis=2)
    slope = by_mask * scale
    return (slope @ wide[0], summed(slope.swapaxes(2, 3) @ q), summed(weight.swapaxes(2, 3) @ dout),
            by_mask.sum(axis=shared).reshape(bias.shape))


def _bf16(x):
    """float32 to bfloat16 bits, to nearest even, and back."""
    bits = x.view(np.uint32).astype(np.uint64)
    bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def _decoded(rng):
    """Two sequences through each kind of cache, in chunks and token by token; what the last step differs by from the formula."""
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    q, k, v = normal(2, 8, 40, 64), normal(2, 2, 40, 64), normal(2, 2, 40, 32)
    nan = lambda *shape: np.full(shape, np.nan, np.float32)  # what holds no token is never read
    pages = rng.permutation(12).astype(np.int32).reshape(2, 6)
    caches = {
        "decoding over slots": (Cache(nan(2, 2, 50, 64), nan(2, 2, 50, 32)), 40),
        "decoding over pages": (Cache(nan(12, 2, 7, 64), nan(12, 2, 7, 32), block_table=pages), 40),
        "decoding over a ring": (Cache(nan(2, 2, 12, 64), nan(2, 2, 12, 32), sinks=3, window=9), 9),
    }
    for name, (cache, window) in caches.items():
        worst, at = 0.0, 0
        for n in (9, 3, 1, 1, 1):
            end = at + n
            cache.append(k[:, :, at:end], v[:, :, at:end])
            got, lse = cache.decode(q[:, :, end - 1:end], return_lse=True)
            j = np.arange(end)
            seen = (j < 3) | (j >= end - window)
            want, want_lse = _naive(*(x.astype(np.float64) for x in (q[:, :, end - 1:end], k[:, :, :end], v[:, :, :end])),
                                    seen, np.float64(0), None, None)
            worst = max(worst, np.abs(got - want).max(), np.abs(lse - want_lse).max())
            at = end
        yield name, worst
    # Different lengths in one call: three tokens of the first sequence and one of the second, packed.
    cache, _ = caches["decoding over slots"]
    cache.append(k[:, :, 15:18], v[:, :, 15:18], counts=[3, 1])
    packed = np.concatenate([q[:1, :, 15:18], q[1:, :, 15:16]], axis=2)
    got = cache.decode(packed, cu_q=[0, 3, 4])
    rows = [(0, 15), (0, 16), (0, 17), (1, 15)]
    worst = 0.0
    for n, (b, i) in enumerate(rows):
        one = [x[b:b + 1].astype(np.float64) for x in (q[:, :, i:i + 1], k[:, :, :i + 1], v[:, :, :i + 1])]
        worst = max(worst, np.abs(got[:, :, n:n + 1] - _naive(*one, np.True_, np.float64(0), None, None)[0]).max())
    yield "sequences of different lengths", worst


def _demonstrate(path):
    library = load(path)
    print(f"attn {library.version}, levels: {' '.join(library.levels)}")
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    q, k, v = normal(2, 50, 8, 64).swapaxes(1, 2), normal(2, 2, 70, 64), normal(2, 2, 70, 64)[:, :, ::-1]
    i, j = np.arange(50)[:, None], np.arange(70)
    keep, bias = rng.random((2, 1, 50, 70)) < 0.8, normal(8, 50, 70)
    keep[1, 0, 7] = False  # a row that sees nothing
    bfloats, rounded = zip(*(_bf16(np.ascontiguousarray(x)) for x in (q, k, v)))
    halves = [x.astype(np.float16) for x in (q, k, v)]
    all_keys, nothing = np.True_, np.float64(0)
    cases = [  # name, inputs, what they are exactly, options, visible, bias, bound
        ("float32, strided", (q, k, v), None, {}, all_keys, nothing, 4e-6),
        ("causal, top left", (q, k, v), None, {"causal": "top_left"}, j <= i, nothing, 4e-6),
        ("causal, bottom right", (q, k, v), None, {"causal": "bottom_right"}, j <= i + 20, nothing, 4e-6),
        ("window", (q, k, v), None, {"window": (9, 4)}, (j >= i + 11) & (j <= i + 24), nothing, 4e-6),
        ("boolean mask", (q, k, v), None, {"mask": keep}, keep, nothing, 4e-6),
        ("additive mask", (q, k, v), None, {"mask": bias}, all_keys, bias, 4e-6),
        ("scale and soft-cap", (q, k, v), None, {"scale": 0.3, "softcap": 5.0}, all_keys, nothing, 4e-6),
        ("one thread", (q, k, v), None, {"threads": 1}, all_keys, nothing, 4e-6),
        ("float16", halves, halves, {}, all_keys, nothing, 2e-3),
        ("bfloat16", bfloats, rounded, {"dtype": "bf16"}, all_keys, nothing, 1e-2),
    ]
    fine = True
    for name, inputs, exact, options, visible, added, bound in cases:
        out, lse = sdpa(*inputs, return_lse=True, **options)
        want, want_lse = _naive(*(x.astype(np.float64) for x in exact or inputs), visible, added,
                                options.get("scale"), options.get("softcap"))
        if out.dtype == np.uint16:
            out = (out.astype(np.uint32) << 16).view(np.float32)
        seen = np.isfinite(want_lse)
        error = max(np.abs(out - want).max(), np.abs(lse[seen] - want_lse[seen]).max())
        right = error <= bound and (lse[~seen] == -np.inf).all()
        fine &= bool(right)
        print(f"{'ok   ' if right else 'WRONG'} {name}: largest difference {error:.1e}")
    dout = normal(2, 8, 50, 64)
    for name, options, visible, added in (("plain", {}, all_keys, nothing),
                                          ("causal", {"causal": "bottom_right", "scale": 0.2}, j <= i + 20, nothing),
                                          ("boolean mask", {"mask": keep}, keep, nothing),
                                          ("additive mask", {"mask": bias}, all_keys, bias)):
        out, lse = sdpa(q, k, v, return_lse=True, **options)
        found = sdpa_backward(q, k, v, out, lse, dout, return_dmask=added is bias, **options)
        want = _naive_backward(*(x.astype(np.float64) for x in (q, k, v, dout)), visible, added, options.get("scale"))
        error = max(np.abs(x - y).max() / max(1, np.abs(y).max()) for x, y in zip(found, want))
        fine &= error <= 4e-6
        print(f"{'ok   ' if error <= 4e-6 else 'WRONG'} gradients, {name}: largest difference {error:.1e}")
    for name, error in _decoded(rng):
        fine &= error <= 4e-6
        print(f"{'ok   ' if error <= 4e-6 else 'WRONG'} {name}: largest difference {error:.1e}")
    kept = np.empty((2, 50, 8, 64), np.float32).swapaxes(1, 2)
    fine &= sdpa(q, k, v, out=kept) is kept and bool((kept == sdpa(q, k, v)).all())
    for wrong in (lambda: sdpa(q, k[:, :, :, :32], v), lambda: sdpa(q, k, v, out=q), lambda: sdpa(q, k, v, softcap=-1.0)):
        try:
            wrong()
            fine = False
        except AttnError as error:
            print(f"ok    refused: {error}")
    try:
        sdpa(q.astype(np.float64), k, v)
        fine = False
    except TypeError as error:
        fine &= "q is float64" in str(error)
        print(f"ok    refused: {error}")
    doubles = sdpa(q, k, v, mask=bias.astype(np.float64))  # a mask may be of doubles
    fine &= bool((doubles == sdpa(q, k, v, mask=bias)).all())
    return fine


if __name__ == "__main__":
    sys.exit(not _demonstrate(sys.argv[1] if len(sys.argv) > 1 else "target/dist/lib/libattn.so"))
