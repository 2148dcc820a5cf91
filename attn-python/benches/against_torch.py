"""Times `attn` beside torch, and prints the tables of docs/python.md:

    python attn-python/benches/against_torch.py            # the cost of a call and speed, in one table
    python attn-python/benches/against_torch.py models     # a random model of transformers: prompt and tokens

Each number is the shortest of repeated calls, if nothing else is said. Each library has its default number of threads.
"""

import copy
import sys
import time

import numpy as np
import torch

import attn
import attn.torch

OWN = torch.nn.functional.scaled_dot_product_attention


def seconds(call, calls=1):
    """Seconds of one of so many calls."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def shortest(call, calls=1):
    """The shortest of what was measured in 0.6 seconds."""
    call()
    found, end = [], time.perf_counter() + 0.6
    while time.perf_counter() < end or len(found) < 3:
        found.append(seconds(call, calls))
    return min(found)


def overhead():
    """The smallest call: one query, one key, 16 channels."""
    x = np.ones((1, 1, 1, 16), np.float32)
    t, out = torch.from_numpy(x), np.empty_like(x)
    theirs = shortest(lambda: OWN(t, t, t), calls=2000)
    for name, call in [
        ("`attn.sdpa`, NumPy", lambda: attn.sdpa(x, x, x)),
        ("`attn.sdpa`, NumPy, `out=`", lambda: attn.sdpa(x, x, x, out=out)),
        ("`attn.sdpa`, torch", lambda: attn.sdpa(t, t, t)),
        ("`attn.torch.sdpa`", lambda: attn.torch.sdpa(t, t, t)),
    ]:
        row(f"the smallest, {name}", t.dtype, shortest(call, calls=2000), theirs)


def speed():
    """Heads of Llama 3 8B: 32 over 8, of 128 channels."""
    cases = [("1024 tokens, causal", 1024, 1024, True), ("1 query, 4096 keys", 1, 4096, False),
             ("1 query, 32768 keys", 1, 32768, False)]
    for name, q_len, kv_len, causal in cases:
        for dtype in (torch.float32, torch.bfloat16):
            q = torch.randn(1, 32, q_len, 128).to(dtype)
            k, v = (torch.randn(1, 8, kv_len, 128).to(dtype) for _ in range(2))
            ours = shortest(lambda: attn.sdpa(q, k, v, is_causal=causal, enable_gqa=True))
            if q_len == 1:  # torch is faster if the query heads of a group are its queries, as transformers does
                theirs = shortest(lambda: OWN(q.view(1, 8, 4, 128), k, v))
            else:
                theirs = shortest(lambda: OWN(q, k, v, is_causal=causal, enable_gqa=True))
            row(name, dtype, ours, theirs)
    q, k, v = (torch.randn(1, 16, 512, 64, requires_grad=True) for _ in range(3))
    step = lambda f: torch.autograd.grad(f(q, k, v, is_causal=True).sum(), (q, k, v))
    row("512 tokens, causal, with gradients", q.dtype, *(shortest(lambda: step(f)) for f in (attn.torch.sdpa, OWN)))


def table():
    """Overhead and speed: our call beside torch's function."""
    print("| call | type | attn | torch | torch / attn |\n|---|---|---|---|---|")
    overhead()
    speed()


def text(seconds):
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-4 else f"{seconds * 1e3:.2f} ms"


def row(name, dtype, ours, theirs):
    print(f"| {name} | {str(dtype)[6:]} | {text(ours)} | {text(theirs)} | {theirs / ours:.2f} |", flush=True)


@torch.no_grad()
def models():
    """A Llama of two layers with random weights: a prompt of 2048 tokens (the shortest), and a token behind
    it (the median), in turns."""
    import transformers

    import attn.transformers

    attn.transformers.register()
    config = transformers.LlamaConfig(vocab_size=1000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2,
                                      num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=4096,
                                      eos_token_id=None)
    tokens, names, made = torch.randint(2, 1000, (1, 2048)), ("attn", "sdpa", "eager"), {}
    for name in names:
        torch.manual_seed(2)
        own = copy.deepcopy(config)  # a model writes its implementation into its configuration
        made[name] = transformers.AutoModelForCausalLM.from_config(own, attn_implementation=name).eval()
    times, caches = {name: ([], []) for name in names}, {}
    for turn in range(8):
        for name in names:
            if turn < 3:
                times[name][0].append(seconds(lambda: made[name](tokens, logits_to_keep=1)))
            if name not in caches:
                caches[name] = made[name](tokens).cache
            step = lambda: made[name](tokens[:, :1], cache=caches[name])
            times[name][1].extend(seconds(step) for _ in range(16))
            caches[name].crop(-16)
    print("| implementation | prompt, ms | a token, ms |\n|---|---|---|")
    for name, (prompt, token) in times.items():
        print(f"| `{name}` | {min(prompt) * 1e3:.0f} | {sorted(token)[len(token) // 2] * 1e3:.2f} |")
    generate = lambda name: made[name].generate(tokens, max_new_tokens=16, do_sample=False, pad_token_id=0)
    ours, tokens_of_ours = made["attn"](tokens).logits, generate("attn")
    for name in names[1:]:
        difference = (ours - made[name](tokens).logits).abs().max()
        assert difference < 1e-4, f"the logits of {name} differ by {difference}"
        same = "the same" if torch.equal(tokens_of_ours, generate(name)) else "others"
        print(f"\nattn and {name}: largest difference of logits {difference:.1e}, {same} tokens")


if __name__ == "__main__":
    print(f"torch {torch.__version__} on {torch.get_num_threads()} threads, NumPy {np.__version__}, "
          f"level {attn.levels()[-1]}\n")
    models() if "models" in sys.argv else table()
