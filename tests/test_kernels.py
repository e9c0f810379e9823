"""Kernels of attention against plain operations, packed rows without shared prompts, and which kernel a run takes."""

import functools

import debug_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cispo_jax import programs
from cispo_jax.config import ConfigError
from cispo_jax.models import kernels
from cispo_jax.models.attention import attend
from cispo_jax.training import packing
from cispo_jax.training.packing import Layout

interpreted = functools.partial(kernels.splash, interpret=True)


def batch_of(prompts, lengths, width):
    """Left-padded prompts and responses of the given lengths, of which every token trains."""
    S = max(map(len, prompts))
    generator = np.random.default_rng(0)
    tokens = np.zeros((len(prompts), S + width), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        tokens[i, S - len(prompt) : S], mask[i, S - len(prompt) : S + length] = prompt, True
        tokens[i, S : S + length] = generator.integers(1, 11, length)
    return debug_run.batch_of(tokens, mask, width)


def arrays(B=2, T=200, N=4, M=2, H=16):
    """Random queries, keys, values and a cotangent; rows of several segments with pads at the end, and at the start."""
    generator = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(generator.normal(size=shape), jnp.float32)
    segment = np.zeros((B, T), np.int32)
    segment[0, :90], segment[0, 90:180], segment[1, 30:] = 1, 2, 1
    return (normal(B, T, N, H), normal(B, T, M, H), normal(B, T, M, H)), jnp.asarray(segment), normal(B, T, N, H)


def output_and_gradients(function, qkv, segment, cotangent):
    real = (segment > 0)[..., None, None]
    loss = lambda qkv: jnp.sum(jnp.where(real, function(*qkv, segment) * cotangent, 0))
    return jax.jit(lambda qkv: (jnp.where(real, function(*qkv, segment), 0), jax.grad(loss)(qkv)))(qkv)


def check_equal(a, b, atol=2e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol, rtol=0)


@pytest.mark.parametrize("block", [512, 128])  # of the kernel: one, and two that are skipped above the diagonal
def test_splash_masks_segments_as_blocks_do(block, monkeypatch):
    monkeypatch.setattr(kernels, "SPLASH_BLOCK", block)
    check_equal(output_and_gradients(interpreted, *arrays()), output_and_gradients(attend, *arrays()))


def test_splash_on_a_mesh_runs_on_each_devices_rows_and_heads():
    qkv, segment, cotangent = arrays(B=4, T=64)
    expected = output_and_gradients(attend, qkv, segment, cotangent)
    for B in (4, 3):  # rows split over the devices, and too few for that
        with jax.set_mesh(debug_run.mesh(data=2, fsdp=2, tensor=2)):
            found = output_and_gradients(interpreted, [x[:B] for x in qkv], segment[:B], cotangent[:B])
        check_equal(found, jax.tree.map(lambda x, B=B: x[:B], expected))


def test_a_kernel_that_knows_no_prefixes_is_not_given_any():
    qkv, segment, _ = arrays()
    with pytest.raises(ValueError, match="kernel='splash' cannot mask prefixes"):
        attend(*qkv, segment, segment, kernel="splash")


# ---- packed rows whose responses have copies of their prompt


def test_rows_without_shared_prompts_hold_each_response_behind_its_own(monkeypatch):
    batch = batch_of([[5, 6, 7]] * 4 + [[8]] * 4, [3, 1, 4, 2, 4, 4, 4, 4], width=4)
    layout = Layout.of(prompts=2, group_size=4, prompt=3, response=4, shared=False)
    assert (layout.tokens, layout.responses) == (4 * (3 + 3), 16)
    packed, places = packing.pack(batch, layout)
    segments, prefixes = (np.asarray(x).reshape(-1, layout.tokens) for x in (packed.segment_ids, packed.prefix_ids))
    np.testing.assert_array_equal(segments, prefixes)
    assert len({(row, segment) for row in range(len(segments)) for segment in segments[row] if segment}) == 8
    tokens, positions = (np.asarray(x).reshape(-1, layout.tokens) for x in (packed.tokens, packed.positions))
    for i in range(8):
        prompt = [5, 6, 7] if i < 4 else [8]
        row = places.row[i]
        source = np.asarray(packed.source).reshape(len(segments), -1)[row, places.start[i]]
        mine = segments[row] == segments[row, source]
        fed = batch.tokens[i, -4:][: places.lengths[i] - 1].tolist()
        assert tokens[row, mine].tolist() == prompt + fed and source == np.flatnonzero(mine)[len(prompt) - 1]
        assert positions[row, mine].tolist() == list(range(mine.sum()))


@pytest.mark.parametrize("lengths", [[4] * 8, [4, 4, 4, 4, 1, 1, 1, 1], [3, 2, 4, 1, 2, 2, 3, 4]])
@pytest.mark.parametrize("columns", [9, 24])
def test_copies_of_prompts_always_fit(lengths, columns, monkeypatch):
    monkeypatch.setattr(packing, "ROW_TOKENS", columns)
    batch = batch_of([[5, 6, 7]] * 4 + [[8, 8, 8]] * 4, lengths, width=4)
    layout = Layout.of(prompts=2, group_size=4, prompt=3, response=4, shared=False)
    _, places = packing.pack(batch, layout)
    assert (places.row >= 0).all() and places.row.max() < layout.passes * layout.rows


@pytest.mark.parametrize("family", [None, "minimax", "mixtral"])
def test_log_probs_and_gradients_do_not_depend_on_the_kernel(family, monkeypatch):
    """The trainer's log-probs and their gradient, in shared rows by blocks and in copied ones by Splash."""
    monkeypatch.setitem(kernels.KERNELS, "splash", interpreted)
    model = debug_run.model(debug_run.TINY if family is None else debug_run.FAMILIES[family])
    batch = batch_of([[5, 6, 7]] * 4 + [[8]] * 4, [3, 1, 4, 2, 4, 1, 2, 3], width=4)

    def result(kernel):
        layout = Layout.of(prompts=2, group_size=4, prompt=3, response=4, shared=kernel == "blocks")
        packed, places = packing.pack(batch, layout)

        def loss(model):
            total, found = 0.0, []
            for i in range(int(packed.passes)):
                rows = jax.tree.map(lambda x, i=i: x[i] if np.ndim(x) else x, packed)
                log_probs, *_ = programs.response_log_probs(model, rows, kernel=kernel)
                found.append(log_probs)
                total += jnp.sum(log_probs * rows.coefficients)
            return total, jnp.stack(found)

        gradient, log_probs = jax.jit(jax.grad(loss, has_aux=True))(model)
        padded = np.zeros(batch.loss_mask.shape, np.float32)
        found = np.zeros((layout.passes, *log_probs.shape[1:]), np.float32)
        found[: len(log_probs)] = log_probs
        return places.unpack(found, padded), gradient

    check_equal(result("splash"), result("blocks"), atol=5e-5)


# ---- which one a run takes


def chosen(platform, packed=True, prompt_width=8, config=debug_run.TINY, **changes):
    settings = debug_run.config(**changes)
    return programs.choose_kernel(settings, config, platform, prompt_width, packed)


def test_the_kernel_is_the_devices_own_where_it_can_mask():
    long = {"sampling__max_new_tokens": 64}
    assert chosen("cpu", **long) == chosen("cpu", packed=False) == "blocks"
    assert chosen("tpu", **long) == "splash" and chosen("tpu", packed=False) == "splash"
    assert chosen("tpu", prompt_width=17, **long) == "blocks", "copies of long prompts cost more"
    assert chosen("gpu", **long) == chosen("gpu", packed=False) == "blocks"
    assert chosen("gpu", packed=False, model__dtype="bfloat16") == "cudnn"
    assert chosen("tpu", prompt_width=17, model__attention="splash", **long) == "splash"
    assert chosen("tpu", model__attention="blocks", **long) == "blocks"


@pytest.mark.parametrize(
    ("platform", "packed", "changes", "words"),
    [
        ("cpu", True, {"attention": "splash"}, ["attention=splash", "TPU", "auto, blocks."]),
        ("tpu", False, {"attention": "cudnn", "dtype": "bfloat16"}, ["attention=cudnn", "GPU", "auto, blocks, splash"]),
        ("gpu", True, {"attention": "cudnn", "dtype": "bfloat16"}, ["cannot mask the segments", "packing=False"]),
        ("gpu", False, {"attention": "cudnn"}, ["computes in bfloat16", "dtype=float32"]),
    ],
)
def test_a_kernel_that_cannot_do_it_is_refused(platform, packed, changes, words):
    with pytest.raises(ConfigError) as error:
        chosen(platform, packed, **{f"model__{name}": value for name, value in changes.items()})
    for word in words:
        assert word in str(error.value)


def test_a_run_makes_copies_of_prompts_where_the_kernel_needs_them():
    make = lambda **changes: programs.make_programs(
        debug_run.config(**changes), debug_run.TINY, debug_run.mesh(), prompt_width=5
    )
    assert make().kernel == "blocks" and make().layout.shared
    with pytest.raises(ConfigError, match=r"config.model.attention=splash"):
        make(model__attention="splash")
