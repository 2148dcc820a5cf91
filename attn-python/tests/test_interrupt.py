"""Ctrl-C: a signal ends a long call at once, and what the call was to change is whole: as before, or as after."""

import signal
import sys
import threading
import time

import numpy as np
import pytest

import attn

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it sends SIGINT")

TOKENS = 1 << 16  # of one head: 10¹² operations, which no cut by heads or sequences makes shorter


def interrupted(call, after=0.1):
    """Sends SIGINT to this thread from another one. Seconds from then to the end of the call, which raises."""
    sent, main = [], threading.main_thread().ident

    def send():
        sent.append(time.perf_counter())
        signal.pthread_kill(main, signal.SIGINT)

    timer = threading.Timer(after, send)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        call()
        ended = time.perf_counter()
        timer.join()
        time.sleep(1)  # where a call that came to its end would see the signal
        pytest.fail(f"the call had ended {ended - sent[0]:.1f} s after the signal")
    assert sent, "the signal came from elsewhere"
    return time.perf_counter() - sent[0]


def tokens(count=TOKENS, dim=64):
    return np.random.default_rng(1).standard_normal((1, 1, count, dim), dtype=np.float32)


@pytest.mark.parametrize("options", [{}, dict(threads=1), dict(dropout_p=0.1, seed=1), dict(level="portable"),
                                     dict(precision="fast"), dict(reproducible=True)], ids=str)
def test_sdpa(options):
    x = tokens()
    assert interrupted(lambda: attn.sdpa(x, x, x, **options)) < 2


def test_rows_of_out_are_whole():
    x = tokens()
    out = np.full_like(x, 7)
    assert interrupted(lambda: attn.sdpa(x, x, x, out=out), after=0.5) < 2
    written = np.flatnonzero((out[0, 0] != 7).any(-1))
    assert 0 < len(written) < TOKENS
    some = written[:: len(written) // 8]
    np.testing.assert_allclose(out[:, :, some], attn.sdpa(x[:, :, some], x, x), atol=1e-5)


@pytest.mark.parametrize("options", [{}, dict(threads=1), dict(dropout_p=0.1, seed=1)], ids=str)
def test_gradients(options):
    x, lse = tokens(), np.full((1, 1, TOKENS), 11, np.float32)
    assert interrupted(lambda: attn.sdpa_backward(x, x, x, x, x, lse, **options)) < 2


def test_the_gradient_of_a_mask():
    x, lse, mask = tokens(), np.full((1, 1, TOKENS), 11, np.float32), np.zeros((1, 1, 1, TOKENS), np.float32)
    assert interrupted(lambda: attn.sdpa_backward(x, x, x, x, x, lse, mask, return_dmask=True)) < 2


def test_weights():
    x = tokens(6000, 512)
    assert interrupted(lambda: attn.weights(x, x, x)) < 2


PLACES = [dict(capacity=TOKENS), dict(pages=TOKENS // 16), dict(window=5000)]


@pytest.mark.parametrize("dtype", ["float32", "q8_0"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_prompt(place, dtype):
    x, cache = tokens(), attn.Cache(1, 1, 64, dtype=dtype, **place)
    cache.append(x[:, :, :100], x[:, :, :100])
    free, rest = cache.free_pages, x[:, :, 100:]
    assert interrupted(lambda: cache.prefill(rest, rest, rest)) < 2
    if "window" in place:
        assert 100 < cache.lens[0] < TOKENS
        return
    assert (cache.lens, cache.free_pages) == ([100], free)
    some = rest[:, :, :50]
    again = attn.Cache(1, 1, 64, dtype=dtype, **place)
    np.testing.assert_array_equal(cache.prefill(some, some, some),
                                  again.prefill(x[:, :, :150], x[:, :, :150], x[:, :, :150])[:, :, 100:])


@pytest.mark.parametrize("threads", [None, 1])
def test_decode(threads):
    x, cache = tokens(), attn.Cache(1, 1, 64, capacity=TOKENS)
    cache.append(x, x)
    assert interrupted(lambda: cache.decode(x, threads=threads)) < 2
    assert cache.lens == [TOKENS]


@pytest.mark.parametrize("place", ["capacity", "pages", "window"])
def test_append(place):
    count = 3 << 19
    x = np.broadcast_to(np.float32(1.5), (1, 1, count, 256))
    places = dict(capacity=dict(capacity=count + 3), pages=dict(pages=count // 16 + 1), window=dict(window=count - 10))
    cache = attn.Cache(1, 1, 256, dtype="q4_0", **places[place])
    one = tokens(3, 256)
    cache.append(one, one)
    free = cache.free_pages
    assert interrupted(lambda: cache.append(x, x)) < 1
    if place == "window":
        assert 3 < cache.lens[0] < count
    else:
        assert (cache.lens, cache.free_pages) == ([3], free)


def test_merge():
    x = tokens(1 << 20)
    parts = [(x, np.zeros((1, 1, 1 << 20), np.float32))] * 6
    assert interrupted(lambda: attn.merge(parts)) < 1


def test_rope():
    x = np.broadcast_to(np.float16(1.5), (1, 1, 1 << 21, 128))
    assert interrupted(lambda: attn.rope(x)) < 2


def test_threads_of_python_are_not_interrupted():
    """Python runs handlers on its main thread only: a call of another thread comes to its end."""
    x, found = tokens(1 << 13), []
    thread = threading.Thread(target=lambda: found.append(attn.sdpa(x, x, x)))
    thread.start()
    assert interrupted(lambda: time.sleep(9)) < 2
    thread.join()
    assert len(found) == 1
