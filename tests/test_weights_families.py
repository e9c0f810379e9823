"""Model folders of every family, in and out: transformers' numbers, both dialects of MiniMax, what is refused."""

import dataclasses
import json
import shutil
import struct
import tracemalloc
from pathlib import Path

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cispo_jax import weights
from cispo_jax.config import ConfigError
from cispo_jax.log_probs import token_log_probs
from cispo_jax.models import PRESETS, Transformer, TransformerConfig, forward
from cispo_jax.sampling import sample_groups
from cispo_jax.weights import families, huggingface, layout, safetensors

FOLDER = Path(__file__).parent / "data" / "families"  # made by make_families_fixture.py
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "minimax")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """Name, our model and architecture, transformers' numbers."""
    with np.load(FOLDER / request.param / "reference.npz") as file:
        return request.param, *weights.load_pretrained(FOLDER / request.param), dict(file)


def raw(folder) -> dict[str, bytes]:
    """Every tensor of a folder as dtype, shape and bytes, read without the code under test."""
    found = {}
    for path in Path(folder).glob("*.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                first, last = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = (entry["dtype"], entry["shape"], data[first:last])
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Against transformers


def test_logits_of_a_left_padded_batch(family):
    _, model, _, expected = family
    found = forward(model, jnp.asarray(expected["tokens"], jnp.int32), jnp.asarray(expected["mask"]))
    difference = np.abs(found - expected["logits"])[expected["mask"]].max()
    assert difference <= 2e-4 * np.abs(expected["logits"]).max()


def test_greedy_continuation(family):
    _, model, _, expected = family
    prompts = [row[mask].tolist() for row, mask in zip(expected["tokens"], expected["mask"], strict=True)]
    options = {
        "group_size": 1,
        "max_new_tokens": expected["greedy"].shape[1],
        "temperature": 0.0,
        "eos_ids": (),
        "seed": 0,
    }
    np.testing.assert_array_equal(sample_groups(model, prompts, **options).response_tokens, expected["greedy"])


def test_gradients(family):
    _, model, config, expected = family
    tokens, mask = jnp.asarray(expected["tokens"], jnp.int32), jnp.asarray(expected["mask"])
    real = mask[:, :-1] & mask[:, 1:]

    def loss(model):
        log_probs = token_log_probs(forward(model, tokens, mask)[:, :-1], tokens[:, 1:])
        return -jnp.where(real, log_probs, 0.0).sum() / real.sum()

    value, gradient = jax.value_and_grad(loss, allow_int=True)(model)
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-5)
    tensors = huggingface.tensors_of(gradient, config)
    names = [name for name in expected if name.startswith("model.")]
    assert len(names) == 3
    for name in names:
        found = huggingface._assemble(tensors[name], np.dtype("float32"))
        assert np.abs(found - expected[name]).max() <= 1e-3 * np.abs(expected[name]).max(), name


def test_both_dialects_of_minimax_are_one_model(tmp_path):
    folder = shutil.copytree(FOLDER / "minimax", tmp_path / "published")
    (folder / "config_published.json").rename(folder / "config.json")
    model, config = weights.load_pretrained(folder)
    theirs, their_config = weights.load_pretrained(FOLDER / "minimax")
    assert dataclasses.replace(config, lightning_block=their_config.lightning_block) == their_config
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(model), jax.tree.leaves(theirs))


# ---------------------------------------------------------------------------------------------------------------------
# Round trip, shards


def test_round_trip_is_bit_equal(family, tmp_path):
    name, model, config, _ = family
    assert config.file_dtype == "bfloat16" and config.context_length == 128
    weights.save_pretrained(tmp_path / "out", model, config, max_shard_bytes=9_000)
    found, expected = raw(tmp_path / "out"), raw(FOLDER / name)
    derived = {tensor for tensor in expected if tensor.endswith(layout.DERIVED)}
    assert bool(derived) == (name == "minimax")
    assert found == {tensor: value for tensor, value in expected.items() if tensor not in derived}
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    again, config_again = weights.load_pretrained(tmp_path / "out")
    assert config_again == config
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again), jax.tree.leaves(model))


def test_one_file_and_another_dtype(tmp_path):
    model, config = weights.load_pretrained(FOLDER / "qwen2")
    weights.save_pretrained(tmp_path, model, config, dtype=jnp.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert {dtype for dtype, _, _ in raw(tmp_path).values()} == {"F32"}
    assert weights.load_config(tmp_path) == dataclasses.replace(config, file_dtype="float32")
    with pytest.raises(ConfigError, match=r"already holds weights \(model\.safetensors\)"):
        weights.save_pretrained(tmp_path, model, config)
    half, _ = weights.load_pretrained(FOLDER / "qwen2", dtype=jnp.bfloat16)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(half))


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"fsdp": 1, "expert": 4}, {"data": 2, "fsdp": 2}]
)
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("minimax", marks=pytest.mark.slow)])
def test_straight_onto_shards_and_out_again(name, sizes, tmp_path):
    if name == "qwen3_moe" and "tensor" in sizes:
        name = "qwen2"  # one key head does not split
    plain, config = weights.load_pretrained(FOLDER / name)
    model, _ = weights.load_pretrained(FOLDER / name, mesh=debug_run.mesh(**sizes))
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(model))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(model), jax.tree.leaves(plain))
    weights.save_pretrained(tmp_path / "out", model, config)
    found, expected = raw(tmp_path / "out"), raw(FOLDER / name)
    assert all(value == expected[tensor] for tensor, value in found.items())


def test_a_mesh_that_does_not_divide_is_refused():
    with pytest.raises(
        ConfigError, match=r"config\.mesh\.tensor=2 does not divide num_kv_heads=1 of config\.model: valid"
    ):
        weights.load_pretrained(FOLDER / "mixtral", mesh=debug_run.mesh(fsdp=2, tensor=2))


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"fsdp": 2, "expert": 2}, {"fsdp": 2, "tensor": 2}])
def test_no_device_gathers_more_than_one_tensor_of_the_file(sizes):
    """8 layers of 4 experts: the stacked parameter is 32 tensors."""
    mesh = debug_run.mesh(**sizes)
    spec = P(None, "expert", "fsdp", "tensor")
    shape = jax.ShapeDtypeStruct((8, 4, 64, 64), jnp.float32, sharding=NamedSharding(mesh, spec))
    compiled = huggingface._element(shape.sharding, "bfloat16").lower(shape, np.zeros(2, np.int32)).compile()
    memory, element = compiled.memory_analysis(), 64 * 64 * 4
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 4 * element


def test_every_bit_pattern_survives():
    mesh = debug_run.mesh(fsdp=2, expert=2)
    values = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).reshape(2, 4, 64, 128)
    array = jax.device_put(values, NamedSharding(mesh, P(None, "expert", "fsdp", None)))
    found = [huggingface._fetch(array, (layer, expert), values.dtype) for layer in range(2) for expert in range(4)]
    np.testing.assert_array_equal(np.stack(found).view(np.uint16), values.reshape(8, 64, 128).view(np.uint16))


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_bytes_of_a_shard_are_read(name, monkeypatch):
    """Halving any axis of any parameter halves what is read, and gives that half of the whole."""
    config, checkpoint = huggingface._open(epath.Path(FOLDER / name))
    taken = []
    read = safetensors.Checkpoint._read

    def counted(self, tensor, start, count):
        taken.append(count)
        return read(self, tensor, start, count)

    monkeypatch.setattr(safetensors.Checkpoint, "_read", counted)
    with checkpoint:
        for path, leaf in layout.leaves(config).items():
            index = tuple(slice(0, size) for size in leaf.shape)
            whole = huggingface.read_shard(checkpoint, leaf, index, dtype=np.dtype("float32"))
            for axis, size in enumerate(leaf.shape):
                half = (*index[:axis], slice(size // 2, size), *index[axis + 1 :])
                taken.clear()
                part = huggingface.read_shard(checkpoint, leaf, half, dtype=np.dtype("float32"))
                np.testing.assert_array_equal(part, whole[half], err_msg=path)
                assert sum(taken) == part.size, (path, axis)


def test_memory_of_reading_is_the_result_and_a_chunk(tmp_path):
    """80 MB: a second copy, or the whole tensor before its transposition, would not pass."""
    config = TransformerConfig(20_000, 1_000, 1, 2, 1, 8, 8, tied_head=False, file_dtype="float32")
    leaf = layout.leaves(config)["head"]
    shard = safetensors.Shard({"lm_head.weight": leaf.stored_shape})
    values = np.arange(20_000_000, dtype=np.float32).reshape(leaf.stored_shape)
    safetensors.write_shard(epath.Path(tmp_path / "model.safetensors"), shard, values.dtype, [values])
    checkpoint = safetensors.open_checkpoint(epath.Path(tmp_path))
    tracemalloc.start()
    with checkpoint:
        found = huggingface.read_shard(checkpoint, leaf, (slice(0, 1_000), slice(0, 20_000)), dtype=values.dtype)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(found[:, ::999], values.T[:, ::999])
    assert peak < found.nbytes + 20 * 2**20


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_place_for_each_parameter(name):
    abstract = jax.eval_shape(lambda: Transformer(PRESETS[name], key=jax.random.key(0)))
    shapes = {huggingface.path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)}
    assert {path: leaf.shape for path, leaf in layout.leaves(PRESETS[name]).items()} == shapes


# ---------------------------------------------------------------------------------------------------------------------
# config.json

CONFIGS = {
    **PRESETS,
    "some_layers_dense": TransformerConfig(
        *(32, 16, 4, 4, 2, 8, 64), qk_norm=True, mlp=("dense", "moe"), num_experts=4, experts_per_token=1, expert_dim=8
    ),
    "hybrid_written_as_published": TransformerConfig(
        *(32, 16, 4, 4, 2, 8, 24),
        attention=("lightning", "softmax"),
        mlp=("moe",),
        num_experts=4,
        experts_per_token=2,
        expert_dim=24,
        mlp_residual=(2.0, 0.5),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_architecture_written_is_the_one_read(name):
    values = json.loads(json.dumps(families.write_config(CONFIGS[name])))
    assert families._canonical(families.read_config(values, "x")) == families._canonical(CONFIGS[name])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            dict(mlp=("moe",), num_experts=4, experts_per_token=2, expert_dim=8, normalize_gates=False),
            "normalize_gates",
        ),
        (dict(rotary_dim=4), "rotary_dim=4"),
        (dict(qk_norm=True, qkv_bias=True), "qkv_bias=True"),
        (dict(postnorm=True), "mlp=('dense',)"),
        (dict(mlp_residual=(2.0, 1.0)), "mlp_residual"),
    ],
)
def test_what_no_family_has_is_not_written(changes, named, tmp_path):
    config = dataclasses.replace(PRESETS["debug"], **changes)
    with pytest.raises(ConfigError, match="no published family has") as error:
        weights.save_pretrained(tmp_path / "out", None, config)
    assert named in str(error.value) and not (tmp_path / "out").exists()


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama", {"rope_scaling": LLAMA3}, "rope_scaling="),
        ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}}, "rope_parameters="),
        ("llama", {"rope_theta": 5e5}, "contradicts rope_theta=500000"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("llama", {"some_new_gate": False}, "some_new_gate=False"),
        ("llama", {"num_hidden_layers": None}, "missing: num_hidden_layers"),
        ("llama", {"hidden_size": "24"}, "hidden_size='24'"),
        ("llama", {"architectures": ["LamaForCausalLM"]}, 'Did you mean "LlamaForCausalLM"'),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window=64"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ("mixtral", {"sliding_window": 4096}, "sliding_window=4096"),
        ("minimax", {"layer_types": ["full_attention"]}, "layer_types="),
        ("minimax", {"layer_types": None, "num_key_value_heads": 3}, "num_kv_heads=3"),
        ("minimax_published", {"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
        ("minimax_published", {"num_attention_heads": 6}, "num_attention_heads=6"),
        ("minimax_published", {"attn_type_list": None}, "missing: attn_type_list"),
    ],
)
def test_settings_are_refused_by_name(name, changes, named):
    family, published, _ = name.partition("_published")
    values = (
        json.loads((FOLDER / family / ("config_published.json" if published else "config.json")).read_text()) | changes
    )
    with pytest.raises(ConfigError) as error:
        families.read_config(values, "folder/config.json")
    assert named in str(error.value) and "folder/config.json" in str(error.value) and "\n" not in str(error.value)


def test_older_files_are_read_alike():
    """transformers 4: rope_theta at the top, the head dimension left out, num_experts."""
    values = json.loads((FOLDER / "llama" / "config.json").read_text())
    expected = families.read_config(values, "x")
    del values["head_dim"]
    old = {"rope_theta": values.pop("rope_parameters")["rope_theta"], "rope_scaling": None, "torch_dtype": "bfloat16"}
    assert families.read_config(values | old, "x") == expected
    values = json.loads((FOLDER / "qwen3_moe" / "config.json").read_text())
    expected = families.read_config(values, "x")
    values["num_experts"] = values.pop("num_local_experts")
    assert families.read_config(values, "x") == expected and expected.num_experts == 4
    values |= {"mlp_only_layers": [1]}
    assert families.read_config(values, "x").mlp == ("moe", "dense")


# ---------------------------------------------------------------------------------------------------------------------
# Folders that are not whole


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_index(folder, **changes):
    index = folder / safetensors.INDEX
    edit_json(index, weight_map=json.loads(index.read_text())["weight_map"] | changes)


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def only_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def edit_header(path, change):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


SHARD = "model-00002-of-00002.safetensors"
NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("llama", lambda f: cut(f / "model.safetensors", 19_000), ["model.safetensors is truncated", "tensor model."]),
        ("llama", lambda f: cut(f / "model.safetensors", 100), ["model.safetensors is truncated", "100 bytes"]),
        ("llama", lambda f: cut(f / "model.safetensors", 0), ["model.safetensors is truncated", "0 bytes"]),
        ("mixtral", lambda f: cut(f / SHARD, 4_400), [SHARD, "is truncated", "tensor model."]),
        ("mixtral", lambda f: (f / SHARD).unlink(), [SHARD, "this shard is missing", "tensor model."]),
        (
            "llama",
            lambda f: edit_json(f / "config.json", vocab_size=41),
            ["model.embed_tokens.weight is [40, 24]", "[41, 24]"],
        ),
        ("llama", only_pickle, ["pytorch_model.bin", "pickle"]),
        ("llama", lambda f: (f / "model.safetensors").unlink(), ["holds no *.safetensors file"]),
        (
            "llama",
            lambda f: edit_json(f / "config.json", architectures=["GPT2LMHeadModel"]),
            ["GPT2LMHeadModel", "config.json"],
        ),
        ("llama", lambda f: (f / "config.json").write_text("{"), ["config.json", "JSON"]),
        ("llama", lambda f: (f / "config.json").unlink(), ["is a directory. It holds no config.json"]),
        (
            "mixtral",
            lambda f: edit_index(f, **{NORM: "../model.safetensors"}),
            [safetensors.INDEX, NORM, "'../model.safetensors'"],
        ),
        ("mixtral", lambda f: edit_index(f, **{NORM: "/etc/passwd"}), [safetensors.INDEX, NORM, "'/etc/passwd'"]),
        ("mixtral", lambda f: edit_index(f, extra=SHARD), [SHARD, "does not hold tensor extra"]),
        ("mixtral", lambda f: (f / safetensors.INDEX).unlink(), ["2 *.safetensors files but no", safetensors.INDEX]),
        ("mixtral", lambda f: edit_json(f / safetensors.INDEX, weight_map=[]), [safetensors.INDEX, "no weight_map"]),
        ("qwen2", lambda f: edit_json(f / "config.json", num_hidden_layers=1), ["unknown: model.layers.1."]),
        ("qwen2", lambda f: edit_json(f / "config.json", num_hidden_layers=3), ["missing: model.layers.2."]),
        (
            "qwen2",
            lambda f: edit_header(f / "model.safetensors", lambda h: h[NORM].update(dtype="I16")),
            [f"not of floating-point numbers: {NORM} is I16"],
        ),
        (
            "qwen2",
            lambda f: edit_header(f / "model.safetensors", lambda h: h[NORM].update(shape=[-20])),
            [f"tensor {NORM} is malformed"],
        ),
        (
            "qwen2",
            lambda f: edit_header(f / "model.safetensors", lambda h: h[NORM].update(data_offsets=[0, 40])),
            ["is malformed"],
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_one_paragraph(name, damage, words, tmp_path):
    folder = shutil.copytree(FOLDER / name, tmp_path / "model")
    damage(folder)
    for load in (weights.load_config, weights.load_pretrained):
        with pytest.raises(ConfigError) as error:
            load(folder)
        message = str(error.value)
        assert all(word in message for word in words) and "\n" not in message, message


def test_a_tied_model_may_bring_its_head(tmp_path):
    folder = shutil.copytree(FOLDER / "llama", tmp_path / "model")
    values = raw(folder)
    head = np.frombuffer(values["model.embed_tokens.weight"][2], np.uint16).reshape(40, 24)
    shard = safetensors.Shard({"lm_head.weight": (40, 24)})
    safetensors.write_shard(
        epath.Path(folder / "head.safetensors"), shard, np.dtype("bfloat16"), [head.view("bfloat16")]
    )
    places = dict.fromkeys(values, "model-1.safetensors") | {"lm_head.weight": "head.safetensors"}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": places}))
    assert weights.load_config(folder).tied_head
