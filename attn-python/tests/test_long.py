"""Processes and long calls: forks compute, and a long call has the bits of short ones."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import attn


def test_a_sequence_has_the_bits_of_its_batch():
    rng = np.random.default_rng(1)
    turned = lambda heads: rng.standard_normal((2, 4000, heads, 128), dtype=np.float32).swapaxes(1, 2)
    q, k, v = turned(8), turned(2), turned(2)
    mask = rng.standard_normal((8, 1, 4000), dtype=np.float32)
    options = dict(enable_gqa=True, is_causal=True, softcap=9.0)
    blocks = rng.random((8, 4, 4)) < 0.8
    tables = dict(block_mask=(blocks, 1000, 1000), sinks=rng.standard_normal(8), alibi=True)
    out, lse = attn.sdpa(q, k, v, mask, kv_lens=[4000, 3500], return_lse=True, **options, **tables)
    for b, length in enumerate([4000, 3500]):
        one = [x[b:b + 1] for x in (q, k, v)]
        want, want_lse = attn.sdpa(*one, mask, kv_lens=[length], return_lse=True, **options, **tables)
        np.testing.assert_array_equal(out[b:b + 1], want)
        np.testing.assert_array_equal(lse[b:b + 1], want_lse)


PROGRAM = """
import numpy as np, attn
x = np.ones((1, 64, 8192, 64), np.float32)
print("ready", flush=True)
attn.sdpa(x, x, x)
print("done", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it sends SIGINT")
def test_ctrl_c_ends_a_long_call():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.3)  # the whole call takes several seconds
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert rest == b"" and b"KeyboardInterrupt" in errors


FORKS = """
import os, numpy as np, attn
x = np.random.default_rng(1).standard_normal((1, 4, 500, 64), np.float32)
want = attn.sdpa(x, x, x)  # starts threads, which the child has not
child = os.fork()
if child == 0:
    os._exit(0 if (attn.sdpa(x, x, x) == want).all() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
def test_a_forked_process_computes():
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)
