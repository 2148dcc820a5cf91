"""Runs the attention of torch, onnxruntime, OpenVINO and JAX for `cargo xtask bench --kernels`, driven over stdin and stdout.

One process per thread count. A request is a line of JSON, followed by raw little-endian f32 where it says so; an answer is a
line of JSON, `{"error": text}` where something went wrong. Requests:

  {"op": "load", "case": {...}, "number": "f32", "what": "plain", "value": 0, "floats": [nq, nk, nv, nextra]} + q, k, v, extra
      -> {"peers": [names that can run this case]}; where the number is "f16" or "bf16", in that type: torch only
     "what": "decode" is one query per head over a cache; everything is rounded to the number's type
     "what": "backward" is the gradients of a plain call by q, k and v, for the gradient by the output in extra
  {"op": "time", "peer": name, "calls": n} -> {"seconds": per call, "processor": seconds of the process per call}
     with "sweep": n, so many bytes are read before each call, which fills the processor's caches with them
  {"op": "memory", "peer": name} -> {"bytes": growth of the resident set over one call, or null}
  {"op": "out", "peer": name} -> {"floats": n} + the output [B, H, Sq, D], or all gradients

Whatever cannot be imported is not offered; nothing is installed or fetched.
"""

import json
import os
import sys
import time

import numpy as np

THREADS = int(os.environ.get("PEER_THREADS", "1"))
STDIN, STDOUT = sys.stdin.buffer, sys.stdout.buffer
sys.stdout = sys.stderr  # a library that prints must not disturb the protocol

try:
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
except ImportError:
    torch = None

try:
    import onnx
    import onnxruntime

    # It has no switch for its instruction set: beside a level that is held to AVX2 it is left out.
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        raise ImportError("onnxruntime cannot be held to AVX2")
    from onnx import TensorProto, helper
except ImportError:
    onnxruntime = None


# These two cannot be held to AVX2 either.
HELD = os.environ.get("ATEN_CPU_CAPABILITY") == "avx2"
try:
    openvino = None
    if not HELD:
        import openvino
except ImportError:
    pass

try:
    jax = None
    if not HELD and THREADS in (1, os.cpu_count()):
        # It has no option for threads: it is held to a core by affinity, before it starts its pool.
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, set(sorted(everywhere)[:THREADS]))
        import jax

        jax.numpy.zeros(1).block_until_ready()
        os.sched_setaffinity(0, everywhere)
except (ImportError, AttributeError):
    pass


def torch_sdpa(case, what, value, q, k, v, extra):
    """scaled_dot_product_attention with the mask in the form torch wants it."""
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[case["number"]]
    q, k, v = (torch.from_numpy(x).to(dtype) for x in (q, k, v))
    sq, skv, causal = case["q_len"], case["kv_len"], case["causal"]
    kw = {"is_causal": causal}
    if case["q_heads"] != case["kv_heads"]:
        kw["enable_gqa"] = True
    i, j = torch.arange(sq)[:, None], torch.arange(skv)[None, :]
    if what == "window":
        kw = {**kw, "is_causal": False, "attn_mask": (j <= i) & (i - j <= int(value)) if causal else i - j <= int(value)}
    elif what == "keep":
        kw["attn_mask"] = torch.from_numpy(extra.reshape(sq, skv)) > 0.5
    elif what == "bias":
        kw["attn_mask"] = torch.from_numpy(extra.reshape(sq, skv))
    elif what == "alibi":
        mask = -torch.from_numpy(extra)[:, None, None] * (i - j).abs()
        if causal:
            mask = mask.masked_fill(j > i, -torch.inf)
        kw = {**kw, "is_causal": False, "attn_mask": mask[None]}
    elif what == "dropout":
        kw["dropout_p"] = value
    elif what == "backward":
        with torch.enable_grad():
            leaves = tuple(x.requires_grad_() for x in (q, k, v))
            out = F.scaled_dot_product_attention(*leaves, **kw)
        dy = torch.from_numpy(extra.reshape(out.shape)).to(dtype)
        flat = lambda grads: np.concatenate([g.float().numpy().ravel() for g in grads])
        return lambda: torch.autograd.grad(out, leaves, dy, retain_graph=True), flat
    elif what not in ("plain", "decode"):
        return None  # soft-capping is not in this operation
    return lambda: F.scaled_dot_product_attention(q, k, v, **kw), lambda out: out.float().numpy()


def onnx_session(node, inputs, output, domains):
    info = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    graph = helper.make_graph([node], "g", [info(n, x.shape) for n, x in inputs.items()], [info("o", output)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(d, n) for d, n in domains], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = THREADS, 1, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(x) for n, x in inputs.items()}
    for name, x in values.items():
        binding.bind_ortvalue_input(name, x)
    out = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(output, np.float32))
    binding.bind_ortvalue_output("o", out)

    def run():
        session.run_with_iobinding(binding)
        return values and out  # keeps the inputs alive

    return run


def ort_attention(case, what, value, q, k, v, extra):
    """The standard operator Attention of ai.onnx 23."""
    if what != "plain":
        return None
    node = helper.make_node("Attention", ["q", "k", "v"], ["o"], is_causal=int(case["causal"]))
    return onnx_session(node, dict(q=q, k=k, v=v), q.shape, [("", 23)]), lambda out: out.numpy()


def ort_mha(case, what, value, q, k, v, extra):
    """The contributed operator MultiHeadAttention, on [batch, seq, heads * dim]."""
    b, h, sq, d = q.shape
    if what != "plain" or h != case["kv_heads"]:
        return None
    flat = lambda x: np.ascontiguousarray(x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1))
    node = helper.make_node(
        "MultiHeadAttention", ["q", "k", "v"], ["o"], domain="com.microsoft", num_heads=h, unidirectional=int(case["causal"])
    )
    run = onnx_session(node, dict(q=flat(q), k=flat(k), v=flat(v)), (b, sq, h * d), [("", 23), ("com.microsoft", 1)])
    return run, lambda out: np.ascontiguousarray(out.numpy().reshape(b, sq, h, d).swapaxes(1, 2))


def ort_gqa(case, what, value, q, k, v, extra):
    """The contributed operator GroupQueryAttention: it puts the last token into the cache, which it reads and writes in place."""
    (b, h, _, d), (_, kv_heads, tokens, _), dtype = q.shape, k.shape, case["number"]
    if dtype == "bf16":
        return None  # it has no kernel for it
    kind, element = {"f32": (np.float32, TensorProto.FLOAT), "f16": (np.float16, TensorProto.FLOAT16)}[dtype]
    flat = lambda x: np.ascontiguousarray(x.swapaxes(1, 2).reshape(b, 1, -1).astype(kind))
    inputs = dict(q=flat(q), k=flat(k[:, :, -1:]), v=flat(v[:, :, -1:]), pk=k.astype(kind), pv=v.astype(kind))
    lens = dict(sl=np.full(b, tokens - 1, np.int32), tl=np.array([tokens], np.int32))
    node = helper.make_node(
        "GroupQueryAttention", [*inputs, *lens], ["o", "nk", "nv"], domain="com.microsoft", num_heads=h, kv_num_heads=kv_heads
    )
    info = helper.make_tensor_value_info
    ins = [info(n, element, x.shape) for n, x in inputs.items()] + [info(n, TensorProto.INT32, x.shape) for n, x in lens.items()]
    outs = [info("o", element, (b, 1, h * d)), info("nk", element, k.shape), info("nv", element, v.shape)]
    graph = helper.make_graph([node], "g", ins, outs)
    domains = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = THREADS, 1, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(x) for n, x in {**inputs, **lens}.items()}
    for name, x in values.items():
        binding.bind_ortvalue_input(name, x)
    out = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((b, 1, h * d), kind))
    for name, x in dict(o=out, nk=values["pk"], nv=values["pv"]).items():
        binding.bind_ortvalue_output(name, x)

    def run():
        session.run_with_iobinding(binding)
        return values and out  # keeps the inputs alive

    return run, lambda out: out.numpy().astype(np.float32).reshape(b, h, 1, d)


def openvino_sdpa(case, what, value, q, k, v, extra):
    """The operator ScaledDotProductAttention of opset 13, which has no grouped heads."""
    if what != "plain" or case["q_heads"] != case["kv_heads"]:
        return None
    from openvino import opset13 as ops

    q, k, v = (np.ascontiguousarray(x) for x in (q, k, v))
    inputs = [ops.parameter(x.shape, np.float32) for x in (q, k, v)]
    node = ops.scaled_dot_product_attention(*inputs, causal=bool(case["causal"]))
    options = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    request = openvino.compile_model(openvino.Model([node], inputs), "CPU", options).create_infer_request()
    for n, x in enumerate((q, k, v)):
        request.set_input_tensor(n, openvino.Tensor(x, shared_memory=True))

    def run():
        request.infer()
        return request.get_output_tensor(0)

    return run, lambda out: out.data


def jax_attention(case, what, value, q, k, v, extra):
    """jax.nn.dot_product_attention, compiled, on [batch, seq, heads, dim]."""
    if what != "plain":
        return None
    q, k, v = (jax.numpy.asarray(x.swapaxes(1, 2)) for x in (q, k, v))
    call = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=bool(case["causal"])))
    return (lambda: call(q, k, v).block_until_ready()), lambda out: np.asarray(out).swapaxes(1, 2)


def makers(case, what):
    if torch:
        yield "torch", torch_sdpa
    if what == "decode":
        if onnxruntime:
            yield "ort-gqa", ort_gqa
        return
    if case["number"] != "f32" or what == "backward":
        return
    # onnxruntime builds whole score matrices: only its short shapes are of interest.
    if onnxruntime and case["q_len"] <= 1024:
        yield "ort-attention", ort_attention
        yield "ort-mha", ort_mha
    if openvino:
        yield "openvino", openvino_sdpa
    if jax and case["q_len"] <= 4096:  # it stores the scores
        yield "jax", jax_attention


def load(request):
    q, k, v, extra = (np.frombuffer(STDIN.read(4 * n), np.float32).copy() for n in request["floats"])
    case, d = request["case"], request["case"]["head_dim"]
    case["number"] = request.get("number", "f32")
    q = q.reshape(case["batch"], case["q_heads"], case["q_len"], d)
    k, v = (x.reshape(case["batch"], case["kv_heads"], case["kv_len"], d) for x in (k, v))
    peers, why = {}, {}
    for name, make in makers(case, request["what"]):
        try:
            peer = make(case, request["what"], request["value"], q, k, v, extra)
            if peer:
                peer[0]()
                peers[name] = peer
        except Exception as error:  # a peer that cannot do a case is left out of it
            why[name] = str(error)[:200]
    return peers, why


def timed(run, calls, sweep):
    if sweep:
        return timed_cold(run, calls, sweep)
    start, ran = time.perf_counter(), time.process_time()
    for _ in range(calls):
        run()
    return {"seconds": (time.perf_counter() - start) / calls, "processor": (time.process_time() - ran) / calls}


swept = np.ones(0, np.float32)


def timed_cold(run, calls, sweep):
    global swept
    if swept.nbytes != sweep:
        swept = np.ones(sweep // 4, np.float32)
    seconds = processor = 0.0
    for _ in range(calls):
        swept.sum()
        start, ran = time.perf_counter(), time.process_time()
        run()
        seconds += time.perf_counter() - start
        processor += time.process_time() - ran
    return {"seconds": seconds / calls, "processor": processor / calls}


def status_kib(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))


def memory(run):
    """Growth of the resident set at the worst moment of one call, in bytes."""
    try:
        before = status_kib("VmRSS:")
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        run()
        return max(0, status_kib("VmHWM:") - before) << 10
    except OSError:
        return None


def answer(**fields):
    STDOUT.write(json.dumps(fields).encode() + b"\n")


def main():
    answer(
        torch=torch and f"{torch.__version__} ({torch.backends.cpu.get_cpu_capability()})",
        onnxruntime=onnxruntime and onnxruntime.__version__,
        openvino=openvino and openvino.__version__.split("-")[0],
        jax=jax and jax.__version__,
    )
    STDOUT.flush()
    peers = {}
    for line in iter(STDIN.readline, b""):
        request = json.loads(line)
        try:
            if request["op"] == "load":
                peers = {}  # before the next: two sets of inputs need not be held at once
                peers, why = load(request)
                answer(peers=list(peers), refused=why)
            elif request["op"] == "time":
                answer(**timed(peers[request["peer"]][0], request["calls"], request.get("sweep", 0)))
            elif request["op"] == "memory":
                answer(bytes=memory(peers[request["peer"]][0]))
            elif request["op"] == "out":
                run, get = peers[request["peer"]]
                out = np.ascontiguousarray(get(run()), np.float32)
                answer(floats=out.size)
                STDOUT.write(out.tobytes())
            else:
                answer(error=f"unknown request {request['op']}")
        except Exception as error:
            answer(error=str(error)[:500])
        STDOUT.flush()


main()
