"""Models of transformers with random weights: logits, padding, caches and greedy tokens as with "eager"."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import attn.transformers

attn.transformers.register()

SMALL = dict(vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             pad_token_id=0, bos_token_id=1, eos_token_id=None)
MODELS = {
    "llama, grouped heads": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "mistral, a window": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=8),
    "gemma 2, a soft-cap and windows": lambda: transformers.Gemma2Config(
        **SMALL, num_key_value_heads=2, head_dim=16, sliding_window=8, attn_logit_softcapping=5.0),
    "gpt-oss, sinks": lambda: transformers.GptOssConfig(
        **SMALL, num_key_value_heads=2, head_dim=16, sliding_window=8, num_local_experts=2, num_experts_per_tok=1),
}


def model(config, implementation):
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():  # random, also where the library begins with zeros
            weight.normal_(0, 0.5 if "sinks" in name else 0.08)
    return made


def prompt():
    tokens = torch.randint(2, 101, (2, 23), generator=torch.Generator().manual_seed(2))
    seen = torch.ones_like(tokens)
    seen[1, :7] = 0  # padding on the left
    return {"input_ids": tokens * seen, "attention_mask": seen}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_and_tokens_are_eagers(name):
    eager, ours = (model(MODELS[name](), implementation) for implementation in ("eager", "attn"))
    assert ours.config._attn_implementation == "attn"
    inputs = prompt()
    want, found = eager(**inputs).logits, ours(**inputs).logits
    real = inputs["attention_mask"].bool()
    assert want.std() > 0.01
    torch.testing.assert_close(found[real], want[real], atol=1e-4, rtol=1e-4)
    options = dict(max_new_tokens=20, do_sample=False)
    assert torch.equal(ours.generate(**inputs, **options), eager.generate(**inputs, **options))
    single = {"input_ids": inputs["input_ids"][:1]}
    assert torch.equal(ours.generate(**single, **options), eager.generate(**single, **options))
    static = dict(options, cache_implementation="static")
    assert torch.equal(ours.generate(**single, **static), eager.generate(**single, **static))


def test_gradients_are_eagers():
    inputs = prompt()
    found = []
    for implementation in ("eager", "attn"):
        made = model(MODELS["gpt-oss, sinks"](), implementation)
        made(**inputs, labels=inputs["input_ids"]).loss.backward()
        found.append({name: weight.grad for name, weight in made.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_an_encoder_sees_both_ways():
    config = transformers.BertConfig(vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                     num_attention_heads=4)
    torch.manual_seed(1)
    eager = transformers.BertModel._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = transformers.BertModel._from_config(config, attn_implementation="attn").eval()
    assert (eager.config._attn_implementation, ours.config._attn_implementation) == ("eager", "attn")
    ours.load_state_dict(eager.state_dict())
    inputs = prompt()
    real = inputs["attention_mask"].bool()
    found, want = (made(**inputs).last_hidden_state[real] for made in (ours, eager))
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_weights_are_refused():
    with pytest.raises(NotImplementedError, match="output_attentions"):
        attn.transformers._attention(None, *[torch.ones(1, 1, 2, 4)] * 3, None, output_attentions=True)
