"""The formula in float64, written out, that the tests compare with."""

import numpy as np


def attention(q, k, v, *, keep=None, bias=None, causal=None, window=None, scale=None, softcap=None, sinks=None,
              slopes=None, kv_lens=None, align=None):
    """Output and log-sum-exp of (batch, heads, seq, dim) arrays; `causal` and `align` are the position of query 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (batch, heads, q_len, dim), kv_len = q.shape, k.shape[2]
    if k.shape[1]:
        k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    score = q @ k.swapaxes(2, 3) * (dim ** -0.5 if scale is None else scale)
    if softcap is not None:
        score = softcap * np.tanh(score / softcap)
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)
    seen = np.ones((batch, 1, q_len, kv_len), bool)
    if bias is not None:
        score = score + np.asarray(bias, np.float64)
    if slopes is not None:
        score = score - np.asarray(slopes, np.float64)[:, None, None] * np.abs(i + align - j)
    if keep is not None:
        seen = seen & keep
    if causal is not None:
        seen = seen & (j <= i + causal)
    if window is not None:
        seen = seen & (j >= i + align - window[0]) & (j <= i + align + window[1])
    if kv_lens is not None:
        seen = seen & (j < np.asarray(kv_lens)[:, None, None, None])
    score = np.where(seen, score, -np.inf)
    most = score.max(axis=3, keepdims=True, initial=-np.inf)
    if sinks is not None:
        most = np.maximum(most, np.asarray(sinks, np.float64)[:, None, None])
    base = np.where(np.isinf(most), 0, most)
    weight = np.exp(score - base)
    total = weight.sum(axis=3, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64)[:, None, None] - base)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + base)[..., 0]
    return weight / np.where(total == 0, 1, total) @ v, lse
