import functools
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cispo_jax
from cispo_jax import masked, objectives
from tests import oracles

GOLDEN = json.loads((pathlib.Path(__file__).parent / "data" / "policy_losses.json").read_text())
LOSSES = {
    name: getattr(cispo_jax, f"{name}_loss")
    for name in ("cispo", "reinforce", "ppo", "grpo", "dapo", "gspo", "unified")
}
DEFAULTS = {  # what DESIGN promises; the oracle is told them explicitly
    "cispo": {"epsilon_low": None, "epsilon_high": 4.0, "aggregation": "token"},
    "reinforce": {"aggregation": "sequence"},
    "ppo": {"epsilon_low": 0.2, "epsilon_high": 0.2, "aggregation": "token"},
    "grpo": {"epsilon_low": 0.2, "epsilon_high": 0.2, "aggregation": "sequence"},
    "dapo": {"epsilon_low": 0.2, "epsilon_high": 0.28, "aggregation": "token"},
    "gspo": {"epsilon_low": 3e-4, "epsilon_high": 4e-4, "aggregation": "sequence"},
    "unified": {"weight_clip": (None, 4.0), "mask_clip": None, "aggregation": "token"},
}
B, T = 5, 7


def batch(seed, spread=0.5, shape=(B, T), per_token_advantages=False):
    """log_probs, old_log_probs, advantages, loss_mask in float32, with holes, ragged ends and an empty row."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.5, shape).astype(np.float32)
    log_probs = (old + rng.normal(size=shape) * spread).astype(np.float32)
    advantages = rng.normal(size=shape if per_token_advantages else shape[:1]).astype(np.float32)
    mask = rng.random(shape) < 0.8
    mask &= np.arange(shape[1]) < rng.integers(1, shape[1] + 1, (shape[0], 1))
    mask[shape[0] // 2] = False
    mask[0, 0] = True
    return log_probs, old, advantages, mask


def dirty(arrays, seed=0):
    """The same batch with NaN, inf and garbage wherever nothing counts."""
    log_probs, old, advantages, mask = arrays
    rng = np.random.default_rng(seed)
    garbage = lambda: rng.choice([np.nan, np.inf, -np.inf, 1e30, 0.0], mask.shape).astype(np.float32)
    if advantages.ndim == 1:
        advantages = np.where(mask.any(1), advantages, np.nan).astype(np.float32)
    else:
        advantages = np.where(mask, advantages, garbage())
    return np.where(mask, log_probs, garbage()), np.where(mask, old, garbage()), advantages, mask


def gradient_of(name, log_probs, *rest, reduced_by=lambda loss: loss, **settings):
    """Gradient by the log-probs; compiled, since a shape that one test uses compiles faster as a whole than operation by operation."""
    return jax.jit(jax.grad(lambda x: reduced_by(LOSSES[name](x, *rest, **settings)[0])))(log_probs)


def assert_close(actual, expected, atol=1e-7):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=atol)


# --- values and gradients -------------------------------------------------------------------------------------------------------

RUNS = {  # golden objective -> (loss, settings from the case's epsilons)
    "cispo": ("cispo", lambda low, high: {"epsilon_low": low, "epsilon_high": high}),
    "cispo_upper_only": ("cispo", lambda low, high: {"epsilon_high": high}),
    "reinforce_is": ("reinforce", lambda low, high: {}),
    "ppo_clip": ("ppo", lambda low, high: {"epsilon_low": low, "epsilon_high": high}),
    "unified_ppo_mask": ("unified", lambda low, high: {"weight_clip": (low, high), "mask_clip": (low, high)}),
    "unified_ppo_mask_no_is_clip": ("unified", lambda low, high: {"weight_clip": None, "mask_clip": (low, high)}),
    "gspo": ("gspo", lambda low, high: {"epsilon_low": low, "epsilon_high": high}),
}
NORMALISATIONS = {
    "batch_token_mean": lambda case: {"aggregation": "token"},
    "group_token_mean": lambda case: {
        "aggregation": "prompt",
        "group_ids": np.pad(case["groups"], (0, 4 - len(case["groups"]))),
    },
    "seq_mean": lambda case: {"aggregation": "sequence", "normalizer": float(len(case["groups"]))},
    "seq_mean_nonempty": lambda case: {"aggregation": "sequence"},
    "fixed_length": lambda case: {
        "aggregation": "constant",
        "normalizer": float(len(case["groups"]) * case["max_completion_length"]),
    },
}


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["id"])
@pytest.mark.parametrize("objective", RUNS)
def test_golden_values_and_gradients(objective, case):
    """Float64 values that TRL, verl and Tunix agree with: they change only if the definition of an objective does."""
    name, settings_of = RUNS[objective]
    settings = settings_of(case["eps_low"], case["eps_high"])
    padded = lambda x: np.pad(
        x, [(0, full - n) for full, n in zip((4, 7), np.shape(x), strict=False)]
    )  # one shape for all cases
    mask = padded(case["mask"])
    arrays = [padded(np.array(case[k], np.float32)) for k in ("logp", "old_logp", "advantages")]
    reference = jax.tree.map(
        lambda x: padded(x) if np.ndim(x) else x, case["reference"][objective], is_leaf=lambda x: isinstance(x, list)
    )

    per_token, metrics = LOSSES[name](*arrays, mask, aggregation="none", **settings)
    assert_close(per_token, reference["per_token_loss"], atol=1e-6)
    gradient = jax.grad(lambda x: LOSSES[name](x, *arrays[1:], mask, aggregation="none", **settings)[0].sum())(
        arrays[0]
    )
    advantages = arrays[2][:, None]
    np.testing.assert_allclose(gradient, -np.array(reference["weight"]) * advantages, rtol=1e-5, atol=0)
    counted = mask.astype(bool)
    assert_close(metrics["weight_mean"], np.mean(np.array(reference["weight"])[counted]))
    assert_close(metrics["ratio_mean"], np.mean(np.array(reference["ratio"])[counted]))
    assert_close(metrics["ratio_max"], np.max(np.array(reference["ratio"])[counted]))

    for normalisation, expected in reference["by_normalisation"].items():
        reduction = NORMALISATIONS[normalisation](case)
        loss_fn = lambda x, reduction=reduction: LOSSES[name](x, *arrays[1:], mask, **settings, **reduction)[0]
        loss, gradient = jax.value_and_grad(loss_fn)(arrays[0])
        np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5, atol=1e-6 if abs(expected["loss"]) < 0.1 else 0)
        np.testing.assert_allclose(gradient, expected["grad_logp"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", ["token", "prompt", "sequence", "constant", "default"])
def test_agrees_with_float64_oracle(name, aggregation):
    rng = np.random.default_rng(11)
    for spread in (0.002, 0.4, 3.0):  # GSPO's range is reached at the small one
        arrays = batch(int(spread * 1000), spread, per_token_advantages=spread == 0.4)
        extra = {
            "group_ids": np.array([7, -3, 7, 2**31 - 1, -3]),
            "token_weights": rng.random((B, T)).astype(np.float32),
            "normalizer": 11.0 if aggregation == "constant" else None,
        }
        settings = DEFAULTS[name] | ({} if aggregation == "default" else {"aggregation": aggregation})
        expected_loss, expected_gradient = oracles.loss_and_gradient(name, *arrays, **settings, **extra)
        given = extra if aggregation == "default" else {"aggregation": aggregation, **extra}
        log_probs, *rest = dirty(arrays)
        value_and_gradient = jax.value_and_grad(lambda *x, given=given: LOSSES[name](*x, **given)[0])
        loss, gradient = (jax.jit(value_and_gradient) if aggregation == "default" else value_and_gradient)(
            log_probs, *rest
        )
        assert loss.dtype == jnp.float32
        assert_close(loss, expected_loss, atol=1e-6)
        assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("magnitude", [60.0, 79.0, 85.0, 1e4])
def test_huge_log_ratios(name, magnitude):
    """Exact up to +-80; beyond it uncapped losses are those of exp(+-80), capped ones do not notice."""
    old = np.array([[-magnitude, -1.0, -2.0], [-1.0, -magnitude, -2.0]], np.float32)
    log_probs = np.array([[-0.5, -1.0 - magnitude, -2.0], [-1.0 - magnitude, -0.25, -2.0]], np.float32)
    arrays = (log_probs, old, np.array([1.0, -1.0], np.float32), np.ones((2, 3)))
    expected = oracles.loss_and_gradient(name, *arrays, **DEFAULTS[name])
    loss, gradient = jax.jit(jax.value_and_grad(lambda x: LOSSES[name](x, *arrays[1:])[0]))(log_probs)
    assert np.isfinite(loss) and np.isfinite(gradient).all()
    # exp turns float32's rounding of a log ratio of 80 into 80 x 6e-8 = 5e-6 of the ratio
    np.testing.assert_allclose(loss, expected[0], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], rtol=2e-5, atol=1e-7)


def test_infinite_old_log_probs_do_not_give_nan():
    """A counted token that the old policy could not produce: the ratio is exp(80), its capped weight 5."""
    log_probs, old = jnp.array([[-1.0, -1.0]]), jnp.array([[-jnp.inf, -1.0]])
    for name, weight in (("cispo", 5.0), ("ppo", 0.0)):
        assert_close(gradient_of(name, log_probs, old, jnp.ones(1), jnp.ones((1, 2))), [[-weight / 2, -0.5]])


def test_extreme_ratios_do_not_overflow_in_the_sum():
    log_probs, old = jnp.zeros((4, 4096)), jnp.full((4, 4096), -100.0)
    loss, _ = jax.jit(LOSSES["ppo"])(log_probs, old, jnp.full(4, -1.0), jnp.ones((4, 4096)))
    assert_close(loss, np.exp(80.0))


# --- the reports that other libraries' users made -------------------------------------------------------------------------------


def test_report_masked_completions_leave_the_denominator():
    """TRL #6369: 25 tokens of loss 1 and 5 truncated, masked ones: 1.0, not 25/30."""
    mask = np.zeros((2, 25))
    mask[0] = 1
    log_probs = np.full((2, 25), -1.0, np.float32)
    for name in ("cispo", "ppo", "dapo", "grpo"):
        advantages = np.ones(2) if name == "cispo" else -np.ones(2)  # every per-token loss is 1
        loss, _ = jax.jit(LOSSES[name])(log_probs, log_probs, advantages, mask)
        assert_close(loss, 1.0)


def test_report_mean_over_devices():
    """TRL #3231: a token of loss 4 on one device, three of loss 0 on the other: 1.0 for every layout, not 2.0."""
    log_probs = jnp.array([[-4.0, 0, 0], [0, 0, 0]])
    mask = jnp.array([[1, 0, 0], [1, 1, 1]])
    args = (log_probs, log_probs, jnp.ones(2), mask)
    assert_close(LOSSES["cispo"](*args)[0], 1.0)
    assert_close(LOSSES["cispo"](*(x[::-1] for x in args))[0], 1.0)
    halves = [objectives.cispo_sums(*(x[i : i + 1] for x in args)) for i in (0, 1)]
    assert_close(masked.means(masked.add_sums(*halves))["loss"], 1.0)

    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    sharded = [jax.device_put(x, sharding) for x in args]
    assert_close(jax.jit(lambda *a: LOSSES["cispo"](*a)[0])(*sharded), 1.0)


@pytest.mark.parametrize(
    ("low", "high", "weights"),
    [
        (1.0, 4.0, [0.5, 1, 3, 5]),  # bounds [0, 5]
        (None, 4.0, [0.5, 1, 3, 5]),
        (0.0, 5.0, [1, 1, 3, 6]),  # what SkyRL #1928 got for "0 and 5": bounds [1, 6]
        (10.0, 4.0, [0.5, 1, 3, 5]),
        (0.2, None, [0.8, 1, 3, 10]),
    ],
)
def test_report_epsilons_are_offsets(low, high, weights):
    ratio = np.array([[0.5, 1, 3, 10]], np.float32)
    old = np.full((1, 4), -1.0, np.float32)
    arrays = (old + np.log(ratio), old, np.ones(1), np.ones((1, 4)))
    assert_close(-4 * gradient_of("cispo", *arrays, epsilon_low=low, epsilon_high=high), [weights])


@pytest.mark.parametrize(("advantage", "cispo", "ppo"), [(1.0, -1.28, 0.0), (-1.0, 1.28, 1.5)])
def test_report_clipping_removes_the_wanted_tokens(advantage, cispo, ppo):
    """AReaL #1421: r = 1.5, cap 1.28: CISPO keeps pushing with the cap, PPO drops the token or leaves it unbounded."""
    old = jnp.full((1, 1), -2.0)
    arrays = (old + jnp.log(1.5), old, jnp.array([advantage]), jnp.ones((1, 1)))
    assert_close(gradient_of("cispo", *arrays, epsilon_high=0.28), [[cispo]])
    assert_close(gradient_of("dapo", *arrays), [[ppo]])


def test_report_every_name_reaches_its_own_formula():
    """TRL #4499: the dispatch by name sent other losses through CISPO's formula. All of them differ on this batch."""
    arrays = batch(0, 0.7, (8, 40))
    values = {name: float(jax.jit(fn)(*arrays)[0]) for name, fn in LOSSES.items() if name != "unified"}
    for name, value in values.items():
        assert value == pytest.approx(oracles.loss_and_gradient(name, *arrays, **DEFAULTS[name])[0], rel=1e-5)
    assert len(set(values.values())) == len(values)


def test_report_nan_under_the_mask():
    """ms-swift #9767, the k3 term: value 0.148721 and gradient [-0.648721, 0]; masking after exp gives NaN in one of them."""
    ref, mask = jnp.array([[-1.0, 0.0]]), jnp.array([[1, 0]])
    value, gradient = jax.value_and_grad(lambda x: cispo_jax.kl_penalty(x, ref, mask))(jnp.array([[-1.5, -1e10]]))
    assert_close(value, 0.148721, atol=1e-6)
    assert_close(gradient, [[-0.648721, 0.0]], atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", ["token", "prompt", "sequence", "none"])
def test_everything_masked(name, aggregation):
    nan = jnp.full((2, 3), jnp.nan)
    group_ids, segment_ids = jnp.array([1, 2]), jnp.ones((2, 3), int)

    def loss_fn(x, segments):
        reduction = {"aggregation": aggregation, "group_ids": group_ids, "segment_ids": segments, "token_weights": nan}
        loss, metrics = LOSSES[name](x, nan, nan[:, 0], jnp.zeros((2, 3), bool), **reduction)
        return loss.sum(), metrics

    for segments in (None, segment_ids):
        (loss, metrics), gradient = jax.value_and_grad(loss_fn, has_aux=True)(nan, segments)
        assert loss == 0 and not gradient.any()
        chex.assert_trees_all_equal(metrics, jax.tree.map(jnp.zeros_like, metrics))


# --- gradients ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_flows_to_log_probs_only(name):
    arrays = [jnp.asarray(x) for x in batch(2, per_token_advantages=True)]
    weights = jnp.ones((B, T))

    def loss_fn(log_probs, old, advantages, token_weights, coefficients, normalizer):
        return LOSSES[name](
            log_probs,
            old,
            advantages,
            arrays[3],
            token_weights=token_weights,
            aggregation=coefficients,
            normalizer=normalizer,
        )[0]

    gradients = jax.jit(jax.grad(loss_fn, argnums=range(6)))(*arrays[:3], weights, weights, 3.0)
    assert jnp.any(gradients[0])
    for gradient in gradients[1:]:
        assert not jnp.any(gradient)


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_are_not_differentiated(name):
    log_probs, *rest = batch(3)
    gradients = jax.jit(jax.jacobian(lambda x: LOSSES[name](x, *rest)[1]))(log_probs)
    assert len(gradients) == 6
    chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, gradients))


@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ties_keep_their_whole_gradient(name, advantage):
    """JAX's minimum and clip hand half of a tie's gradient to the constant; a ratio exactly at a bound is inside."""
    ratio = np.exp(np.array([[0.25, -0.25]], np.float32))  # exactly the bounds below
    r = np.asarray(jnp.exp(jnp.array([[0.25, -0.25]])))
    np.testing.assert_allclose(r, ratio, rtol=1e-6)
    settings = {"epsilon_low": 1 - float(r[0, 1]), "epsilon_high": float(r[0, 0]) - 1, "aggregation": "none"}
    old = jnp.full((1, 2), -1.0)
    arrays = (old + jnp.array([[0.25, -0.25]]), old, jnp.array([advantage]), jnp.ones((1, 2)))
    gradient = gradient_of(name, *arrays, reduced_by=jnp.sum, **settings)
    assert_close(gradient, -advantage * r)
    inside = 1e-5 if advantage > 0 else 0.0
    narrower = settings | {
        "epsilon_high": settings["epsilon_high"] - inside,
        "epsilon_low": settings["epsilon_low"] - 1e-5 + inside,
    }
    gradient = gradient_of(name, *arrays, reduced_by=jnp.sum, **narrower)
    assert gradient[0, 0 if advantage > 0 else 1] == 0 and gradient[0, 1 if advantage > 0 else 0] != 0


def test_ratio_one_is_a_tie_for_nobody():
    """At r = 1 all token-level objectives have REINFORCE's gradient, whatever their value."""
    log_probs, _, advantages, mask = batch(5)
    expected = np.where(mask, -advantages[:, None], 0)
    for name in LOSSES:
        gradient = gradient_of(name, log_probs, log_probs, advantages, mask, aggregation="none", reduced_by=jnp.sum)
        np.testing.assert_array_equal(gradient, expected, err_msg=name)


def test_unified_mask_ties_are_kept():
    r = float(jnp.exp(jnp.float32(0.25)))
    arrays = (jnp.full((1, 1), 0.25), jnp.zeros((1, 1)), jnp.ones(1), jnp.ones((1, 1)))
    assert_close(gradient_of("unified", *arrays, weight_clip=None, mask_clip=(None, r - 1)), [[-r]])
    assert gradient_of("unified", *arrays, weight_clip=None, mask_clip=(None, r - 1 - 1e-6)) == 0


def test_unified_with_mask_only_has_exactly_ppos_gradient():
    for seed in range(5):
        arrays = batch(seed, 0.6)
        unified = gradient_of("unified", *arrays, weight_clip=None, mask_clip=(0.2, 0.28))
        dapo = gradient_of("dapo", *arrays)
        np.testing.assert_array_equal(unified, dapo)
        assert (dapo[arrays[3]] == 0).any()  # some token was dropped


def test_unified_with_the_weight_clipped_too_has_not():
    """Tokens that PPO keeps outside the range (A < 0, r above; A > 0, r below) get the bound as weight instead of r."""
    old = jnp.full((4, 1), -1.0)
    log_probs = old + jnp.log(jnp.array([[1.5], [0.5], [1.5], [0.5]]))
    advantages = jnp.array([-1.0, 1.0, 1.0, -1.0])
    arrays = (log_probs, old, advantages, jnp.ones((4, 1)))
    gradient = functools.partial(
        gradient_of, "unified", *arrays, mask_clip=(0.2, 0.2), aggregation="none", reduced_by=jnp.sum
    )
    weights = lambda **kw: -gradient(**kw)[:, 0] / advantages
    assert_close(weights(weight_clip=None), [1.5, 0.5, 0, 0])
    assert_close(weights(weight_clip=(0.2, 0.2)), [1.2, 0.8, 0, 0])


def test_unified_without_mask_is_cispo():
    log_probs, *rest = batch(8, 1.5)
    chex.assert_trees_all_equal(LOSSES["unified"](log_probs, *rest), LOSSES["cispo"](log_probs, *rest))


def test_second_derivative_of_the_surrogate_is_the_ratios():
    old = jnp.array([[-1.0]])
    loss = lambda x: LOSSES["ppo"](x.reshape(1, 1), old, jnp.ones(1), jnp.ones((1, 1)), epsilon_high=1.0)[0]
    assert_close(jax.grad(jax.grad(loss))(jnp.float32(-0.5)), -np.exp(0.5))


# --- properties -----------------------------------------------------------------------------------------------------------------

SEEDS = st.integers(0, 10**6)
NAMES = st.sampled_from(sorted(LOSSES))
REDUCTIONS = st.sampled_from(["token", "prompt", "sequence"])
PROPERTY = settings(max_examples=20, deadline=None)
FEW = settings(max_examples=8, deadline=None)  # each example runs every row by itself


def run(name, arrays, aggregation, group_ids=None, segment_ids=None, token_weights=None, normalizer=None, **kw):
    """Loss, metrics and gradient as NumPy, run eagerly: compiling each combination would take longer than running it."""
    log_probs, *rest = arrays
    group_ids = np.arange(log_probs.shape[0]) // 2 if group_ids is None else group_ids
    reduction = {
        "aggregation": aggregation,
        "group_ids": group_ids,
        "segment_ids": segment_ids,
        "normalizer": normalizer,
    }
    loss_fn = lambda x: LOSSES[name](x, *rest, **reduction, token_weights=token_weights, **kw)
    (loss, metrics), gradient = jax.value_and_grad(loss_fn, has_aux=True)(log_probs)
    return np.asarray(loss), {k: np.asarray(v) for k, v in metrics.items()}, np.asarray(gradient)


@given(seed=SEEDS, name=NAMES, aggregation=REDUCTIONS, per_token=st.booleans())
@PROPERTY
def test_content_of_padding_changes_nothing(seed, name, aggregation, per_token):
    arrays = batch(seed, 0.6, per_token_advantages=per_token)
    weights = np.random.default_rng(seed).random((B, T)).astype(np.float32)
    base = run(name, arrays, aggregation, token_weights=weights)
    clean = run(name, dirty(arrays, seed), aggregation, token_weights=np.where(arrays[3], weights, np.nan))
    chex.assert_trees_all_equal(base, clean)
    assert (base[2][~arrays[3]] == 0).all()


@given(seed=SEEDS, name=NAMES, aggregation=REDUCTIONS)
@PROPERTY
def test_order_of_rows_and_names_of_groups_change_nothing(seed, name, aggregation):
    arrays = batch(seed, 0.6)
    rng = np.random.default_rng(seed)
    order = rng.permutation(B)
    groups = np.array([0, 0, 1, 2, 1])
    names = rng.choice(np.array([-(2**31), -7, 0, 12, 2**31 - 1], np.int32), 3, replace=False)
    loss, metrics, gradient = run(name, arrays, aggregation, groups)
    moved = run(name, [x[order] for x in arrays], aggregation, names[groups][order])
    assert_close(moved[0], loss, atol=1e-6)
    chex.assert_trees_all_close(moved[1], metrics, rtol=1e-5, atol=1e-6)
    assert_close(moved[2], gradient[order])


def pack(arrays, groups, seed):
    """Several responses a row, in random rows and order, segment ids with gaps; returns packed arrays and each token's place."""
    log_probs, old, advantages, mask = arrays
    rng = np.random.default_rng(seed)
    rows, width = 2, 3 * T
    packed = [np.full((rows, width), np.nan, np.float32) for _ in range(3)] + [np.ones((rows, width), bool)]
    segment_ids, group_ids = np.zeros((rows, width), np.int32), np.full((rows, width), 99)
    place, used, name = np.zeros((B, T, 2), int), [0] * rows, [0] * rows
    for b in rng.permutation(B):
        row = min(range(rows), key=used.__getitem__)
        name[row] += int(rng.integers(1, 1000))
        for t in range(T):
            column = used[row] + t
            values = (log_probs[b, t], old[b, t], advantages[b], mask[b, t])
            for target, value in zip(packed, values, strict=True):
                target[row, column] = value
            segment_ids[row, column], group_ids[row, column], place[b, t] = name[row], groups[b], (row, column)
        used[row] += T
    return packed, segment_ids, group_ids, place


@given(seed=SEEDS, name=NAMES, aggregation=REDUCTIONS)
@PROPERTY
def test_packed_equals_unpacked(seed, name, aggregation):
    """Also with the mask true on the pads (segment 0), and with groups split over rows."""
    arrays = batch(seed, 0.6)
    groups = np.array([0, 0, 1, 2, 1])
    loss, metrics, gradient = run(name, arrays, aggregation, groups)
    packed, segment_ids, group_ids, place = pack(arrays, groups, seed)
    moved = run(name, packed, aggregation, group_ids, segment_ids)
    assert_close(moved[0], loss, atol=1e-6)
    chex.assert_trees_all_close(moved[1], metrics, rtol=1e-5, atol=1e-6)
    assert_close(moved[2][place[..., 0], place[..., 1]], gradient)
    assert np.count_nonzero(moved[2]) == np.count_nonzero(gradient)


@given(seed=SEEDS, name=NAMES, aggregation=REDUCTIONS)
@FEW
def test_slices_of_aggregation_weights_add_up(seed, name, aggregation):
    """Micro-batches of one row each, with groups spread over them: the trainer's way."""
    arrays = batch(seed, 0.6)
    groups = np.array([0, 1, 1, 0, 2])
    loss, _, gradient = run(name, arrays, aggregation, groups)
    weights = np.asarray(cispo_jax.aggregation_weights(arrays[3], aggregation=aggregation, group_ids=groups))
    assert_close(weights.sum(), 1.0)
    parts = [run(name, [x[b : b + 1] for x in arrays], weights[b : b + 1]) for b in range(B)]
    assert_close(sum(part[0] for part in parts), loss, atol=1e-6)
    assert_close(np.concatenate([part[2] for part in parts]), gradient)


@given(seed=SEEDS, name=NAMES)
@FEW
def test_micro_batches_with_the_batchs_normalizer_add_up(seed, name):
    arrays = batch(seed, 0.6)
    for aggregation, count in (("token", arrays[3].sum()), ("sequence", arrays[3].any(1).sum())):
        loss, _, gradient = run(name, arrays, aggregation)
        parts = [run(name, [x[b : b + 1] for x in arrays], aggregation, normalizer=np.float32(count)) for b in range(B)]
        assert_close(sum(part[0] for part in parts), loss, atol=1e-6)
        assert_close(np.concatenate([part[2] for part in parts]), gradient)


@given(seed=SEEDS, name=NAMES, aggregation=st.sampled_from([None, "token", "prompt", "sequence"]))
@FEW
def test_sums_of_micro_batches_pool_to_the_batch(seed, name, aggregation):
    arrays = batch(seed, 0.6)
    groups = np.array([4, 4, 1, 1, 7])
    sums_fn = getattr(objectives, f"{name}_sums")
    parts = [
        sums_fn(*(x[rows] for x in arrays), aggregation=aggregation, group_ids=groups[rows])
        for rows in (slice(0, 2), slice(2, 4), slice(4, 5))
    ]
    pooled = masked.means(functools.reduce(masked.add_sums, parts))
    settings = {} if aggregation is None else {"aggregation": aggregation}
    loss, metrics = LOSSES[name](*arrays, group_ids=groups, **settings)
    chex.assert_trees_all_close(pooled, {"loss": loss, **metrics}, rtol=1e-5, atol=1e-6)


def test_sums_take_a_users_loss_and_refuse_what_does_not_add_up():
    def my_loss(log_probs, old_log_probs, advantages, loss_mask, *, aggregation="token", segment_ids=None):
        return LOSSES["cispo"](
            log_probs, old_log_probs, advantages, loss_mask, aggregation=aggregation, epsilon_high=1.0
        )

    arrays = batch(0)
    total, count = objectives.loss_sums(my_loss, *arrays)["loss"]
    assert_close(total / count, LOSSES["cispo"](*arrays, epsilon_high=1.0)[0])
    for aggregation in ("constant", "none"):
        with pytest.raises(ValueError, match="valid: token"):
            objectives.cispo_sums(*arrays, aggregation=aggregation)


def test_prompt_aggregation_is_a_mean_over_groups_with_a_token():
    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    weights = cispo_jax.aggregation_weights(mask, aggregation="prompt", group_ids=[5, 5, -2, 9])
    assert_close(weights, np.array([[1 / 8] * 3, [1 / 8, 0, 0], [1 / 4, 1 / 4, 0], [0, 0, 0]]))
    weights = cispo_jax.aggregation_weights(mask, aggregation="sequence")
    assert_close(weights, np.array([[1 / 9] * 3, [1 / 3, 0, 0], [1 / 6, 1 / 6, 0], [0, 0, 0]]))
    weights = cispo_jax.aggregation_weights(mask, aggregation="constant", normalizer=12)
    assert_close(weights, mask / 12)
    assert not np.any(cispo_jax.aggregation_weights(np.zeros((2, 2)), aggregation="prompt", group_ids=[1, 1]))


def test_token_weights_never_enter_a_denominator():
    arrays = batch(4)
    for aggregation in ("token", "sequence", "prompt"):
        base = run("cispo", arrays, aggregation)
        doubled = run("cispo", arrays, aggregation, token_weights=np.full((B, T), 2, np.float32))
        assert_close(doubled[0], 2 * base[0])
        assert_close(doubled[2], 2 * base[2])
        chex.assert_trees_all_equal(doubled[1], base[1])


def test_gspo_with_segments_and_holes_uses_each_responses_own_mean():
    log_probs = jnp.array([[-1.0, -2.0, -9.0, -3.0]])
    old = log_probs - jnp.array([[0.1, 0.3, 5.0, -0.2]])
    arrays = (log_probs, old, jnp.ones(1), jnp.array([[1, 1, 0, 1]]))
    _, metrics = jax.jit(LOSSES["gspo"])(*arrays, segment_ids=jnp.array([[3, 3, 3, 8]]))
    assert_close(metrics["ratio_max"], np.exp(0.2))
    assert_close(metrics["ratio_mean"], (2 * np.exp(0.2) + np.exp(-0.2)) / 3)


def test_metrics_count_both_signs():
    """TRL, Liger and others count a capped weight only where A > 0, though the cap acts for both signs."""
    old = jnp.full((4, 1), -1.0)
    log_probs = old + jnp.log(jnp.array([[6.0], [6.0], [0.5], [0.5]]))
    arrays = (log_probs, old, jnp.array([1.0, -1.0, 1.0, -1.0]), jnp.ones((4, 1)))
    _, metrics = LOSSES["cispo"](*arrays, epsilon_low=0.2)
    expected = {
        "ratio_mean": 3.25,
        "ratio_max": 6.0,
        "weight_mean": 2.9,
        "dropped": 0.0,
        "at_cap": 0.5,
        "at_floor": 0.5,
    }
    chex.assert_trees_all_close(metrics, expected, rtol=1e-6)
    _, metrics = LOSSES["ppo"](*arrays)
    assert_close(metrics["dropped"], 0.5)
    assert_close(metrics["weight_mean"], (6 + 0.5) / 4)


# --- inputs ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cispo", "ppo", "gspo"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_any_dtype_is_computed_in_float32(name, dtype):
    """Rows of 300 tokens: a half-precision mean would be off in the second digit."""
    log_probs, old, advantages, mask = batch(6, 1.0, (4, 300))
    cast = [jnp.asarray(x).astype(dtype) for x in (log_probs, old, advantages)]
    loss, metrics = LOSSES[name](*cast, mask)
    exact, exact_metrics = LOSSES[name](*(x.astype(jnp.float32) for x in cast), mask)
    chex.assert_trees_all_equal((loss, metrics), (exact, exact_metrics))
    assert {x.dtype for x in jax.tree.leaves((loss, metrics))} == {jnp.dtype("float32")}
    if dtype != "int32":
        assert gradient_of(name, *cast, mask).dtype == dtype


@pytest.mark.parametrize("kind", ["bool", "int8", "float32", "uint8"])
def test_masks_of_any_kind(kind):
    arrays = batch(9)
    chex.assert_trees_all_equal(LOSSES["cispo"](*arrays[:3], arrays[3].astype(kind)), LOSSES["cispo"](*arrays))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", LOSSES)
def test_empty_batches(name, shape):
    arrays = [np.zeros(shape, np.float32)] * 2 + [np.zeros(shape[:1], np.float32), np.zeros(shape, bool)]
    for aggregation in ("token", "prompt", "sequence"):
        for segment_ids in (None, np.zeros(shape, int)):
            reduction = {"aggregation": aggregation, "group_ids": np.zeros(shape[0], int), "segment_ids": segment_ids}
            loss, metrics = LOSSES[name](*arrays, **reduction)
            assert loss == 0 and not any(metrics.values())


def test_lists_and_host_arrays_and_eager_equal_jit():
    log_probs, old, advantages, mask = batch(10, 0.8)
    for name in ("cispo", "ppo", "gspo"):
        fn = LOSSES[name]
        expected = jax.jit(fn)(log_probs, old, advantages, mask)
        chex.assert_trees_all_close(
            fn(log_probs.tolist(), old.tolist(), advantages.tolist(), mask.tolist()), expected, rtol=1e-5
        )
        with jax.disable_jit():
            chex.assert_trees_all_close(
                fn(log_probs, old, advantages, mask), expected, rtol=1e-5, atol=1e-6, custom_message=name
            )


@pytest.mark.parametrize("name", LOSSES)
def test_strict_type_promotion_and_x64(name):
    """Settings under which other code bases run: no implicit mixture of types, and float64 switched on."""
    arrays = batch(14, 0.8)
    expected = LOSSES[name](*arrays), objectives.loss_sums(LOSSES[name], *arrays)
    with jax.numpy_dtype_promotion("strict"):
        actual = LOSSES[name](*arrays), objectives.loss_sums(LOSSES[name], *arrays)
    chex.assert_trees_all_equal(actual, expected)
    bound = {} if name in ("reinforce", "unified") else {"epsilon_high": np.float64(0.25)}
    jax.config.update("jax_enable_x64", True)
    try:
        loss, metrics = LOSSES[name](*arrays, **bound)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert {x.dtype for x in (loss, *metrics.values())} == {np.dtype("float32")}


def test_segment_ids_of_64_bits_do_not_wrap():
    log_probs, old, advantages, mask = batch(15, 0.8)
    small = np.where(np.arange(mask.shape[1]) < 2, 7, 3) * np.ones((len(mask), 1), int)
    for name in ("grpo", "gspo"):
        expected = LOSSES[name](log_probs, old, advantages, mask, segment_ids=small)
        chex.assert_trees_all_equal(LOSSES[name](log_probs, old, advantages, mask, segment_ids=small * 2**32), expected)


def test_epsilons_may_be_arrays_and_tracers():
    arrays = batch(12, 0.8)
    expected = LOSSES["cispo"](*arrays, epsilon_low=0.5, epsilon_high=0.25)[0]
    assert_close(LOSSES["cispo"](*arrays, epsilon_low=jnp.float32(0.5), epsilon_high=np.float64(0.25))[0], expected)
    traced = jax.jit(lambda low, high: LOSSES["cispo"](*arrays, epsilon_low=low, epsilon_high=high)[0])
    assert_close(traced(0.5, 0.25), expected)
    traced = jax.jit(lambda pair: LOSSES["unified"](*arrays, weight_clip=pair, mask_clip=pair)[0])
    assert_close(traced((0.5, 0.25)), LOSSES["unified"](*arrays, weight_clip=(0.5, 0.25), mask_clip=(0.5, 0.25))[0])


def test_zero_normalizer_of_an_empty_micro_batch():
    zeros = jnp.zeros((1, 2))
    for normalizer in (0.0, jnp.float32(0)):
        for mask in (zeros, zeros + 1):  # 0 says that nothing counts
            loss = LOSSES["cispo"](
                zeros - 1, zeros - 1, jnp.ones(1), mask, aggregation="constant", normalizer=normalizer
            )[0]
            assert loss == 0


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"epsilon_high": 0.0}, "epsilon_high is 0.0; valid: a number > 0"),
        ({"epsilon_high": -0.2}, "epsilon_high"),
        ({"epsilon_high": float("nan")}, "epsilon_high"),
        ({"epsilon_high": "5"}, "epsilon_high is '5'"),
        ({"epsilon_low": -1.0}, "epsilon_low is -1.0; valid: a number >= 0"),
        ({"aggregation": "tokens"}, "aggregation='tokens'; valid: token, prompt, sequence, constant, none"),
        ({"aggregation": "prompt"}, "group_ids"),
        ({"aggregation": "constant"}, "normalizer"),
        ({"aggregation": "none", "normalizer": 2.0}, "normalizer"),
        ({"aggregation": np.ones((2, 2))}, "aggregation must be"),
        ({"normalizer": -1.0}, "normalizer is -1.0"),
        ({"normalizer": "a"}, "normalizer is 'a'"),
        ({"epsilon_high": (1, 2)}, "epsilon_high is .1, 2."),
        ({"old_log_probs": None}, "old_log_probs is None"),
        ({"advantages": None}, "advantages is None"),
        ({"loss_mask": None}, "loss_mask is None"),
        ({"aggregation": None}, "aggregation is None"),
        ({"normalizer": np.ones(3)}, "normalizer is .*; valid: one number"),
        ({"group_ids": np.zeros(2, np.int32)}, "group_ids must be .B. or .B, T."),
        ({"group_ids": np.zeros(3)}, "group_ids must be integers"),
        ({"segment_ids": np.zeros(3, np.int32)}, "segment_ids must be"),
        ({"segment_ids": np.zeros((3, 4))}, "segment_ids must be integers"),
        ({"token_weights": np.zeros(3)}, "token_weights must be"),
        ({"old_log_probs": np.zeros((3, 5))}, "old_log_probs must be"),
        ({"loss_mask": np.zeros((4, 3))}, "loss_mask must be"),
        ({"advantages": np.zeros(4)}, "advantages must be"),
        ({"advantages": np.zeros((3, 1))}, "advantages must be"),
        ({"log_probs": np.zeros(3)}, "must be .B, T."),
    ],
)
def test_bad_input_is_refused_with_its_name(arguments, match, jit):
    zeros = np.zeros((3, 4), np.float32)
    inputs = {"log_probs": zeros, "old_log_probs": zeros, "advantages": zeros[:, 0], "loss_mask": zeros} | arguments
    call = (lambda f: jax.jit(f)()) if jit else (lambda f: f())
    with pytest.raises(ValueError, match=match):
        call(lambda: LOSSES["cispo"](**inputs)[0])


def test_other_functions_refuse_bad_settings():
    zeros = np.zeros((3, 4), np.float32)
    for name in ("ppo", "grpo", "dapo", "gspo"):
        with pytest.raises(ValueError, match="epsilon_high"):
            LOSSES[name](zeros, zeros, zeros[:, 0], zeros, epsilon_high=0)
    with pytest.raises(ValueError, match="mask_clip must be None or a pair"):
        LOSSES["unified"](zeros, zeros, zeros[:, 0], zeros, mask_clip=0.2)
    with pytest.raises(ValueError, match=r"weight_clip\[1\] is 0.0"):
        LOSSES["unified"](zeros, zeros, zeros[:, 0], zeros, weight_clip=(None, 0.0))
    with pytest.raises(ValueError, match="estimator='k4'; valid: k1, k2, k3"):
        cispo_jax.kl_penalty(zeros, zeros, zeros, estimator="k4")
    with pytest.raises(ValueError, match="estimator="):
        cispo_jax.kl_penalty(zeros, zeros, zeros, estimator=["k1"])
    with pytest.raises(ValueError, match="cap is None"):
        cispo_jax.truncated_importance_weights(zeros, zeros, cap=None)
    with pytest.raises(ValueError, match="normalizer has no place"):
        objectives.cispo_sums(zeros, zeros, zeros[:, 0], zeros, normalizer=3.0)
    with pytest.raises(ValueError, match="ref_log_probs"):
        cispo_jax.kl_penalty(zeros, zeros[0], zeros)
    with pytest.raises(ValueError, match="cap"):
        cispo_jax.truncated_importance_weights(zeros, zeros, cap=0.0)
    with pytest.raises(ValueError, match="rollout_log_probs"):
        cispo_jax.truncated_importance_weights(zeros, zeros[0])
    with pytest.raises(ValueError, match="aggregation='none' has no coefficients"):
        cispo_jax.aggregation_weights(zeros, aggregation="none")
    with pytest.raises(ValueError, match="group_ids"):
        cispo_jax.aggregation_weights(zeros, aggregation="prompt")


# --- KL and the engine correction -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(estimator):
    log_probs, ref, _, mask = batch(13, 0.3)
    d = ref.astype(np.float64) - log_probs
    values = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}[estimator]
    gradients = {"k1": np.ones_like(d), "k2": -d, "k3": 1 - np.exp(d)}[estimator]
    kl = functools.partial(cispo_jax.kl_penalty, estimator=estimator)
    value, gradient = jax.value_and_grad(kl)(np.where(mask, log_probs, np.nan), np.where(mask, ref, np.inf), mask)
    assert_close(value, values[mask].mean())
    assert_close(gradient, np.where(mask, gradients, 0) / mask.sum())
    assert_close(kl(log_probs, ref, mask, aggregation="none"), np.where(mask, values, 0), atol=1e-6)
    weights = cispo_jax.aggregation_weights(mask, aggregation="sequence")
    parts = [
        kl(log_probs[b : b + 1], ref[b : b + 1], mask[b : b + 1], aggregation=weights[b : b + 1]) for b in range(B)
    ]
    assert_close(sum(parts), kl(log_probs, ref, mask, aggregation="sequence"))


def test_kl_k3_keeps_its_digits_near_zero_and_stays_finite_far_away():
    zeros, one = jnp.zeros((1, 1)), jnp.ones((1, 1))
    for d in (0.3, 0.11, 0.09, 1e-2, 1e-3, 1e-4, 1e-5, -0.09, -1e-3):
        ref = np.float32(-1 + d)
        exact = float(ref) + 1  # the difference of the two float32 numbers
        value = cispo_jax.kl_penalty(-one, one * ref, one)
        np.testing.assert_allclose(value, np.expm1(exact) - exact, rtol=3e-6)
    gradient = jax.grad(lambda x: cispo_jax.kl_penalty(x, zeros, one))(jnp.full((1, 1), -1e-4))
    np.testing.assert_allclose(gradient, -np.expm1(1e-4), rtol=1e-5)
    value, gradient = jax.value_and_grad(lambda x: cispo_jax.kl_penalty(x, zeros, one))(jnp.full((1, 1), -1e4))
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_truncated_importance_weights():
    old = jnp.array([[-1.0, -1.0, -1.0, 0.0, jnp.nan]])
    rollout = jnp.array([[-1.0, -3.0, -0.5, -1e4, 0.0]])
    weights = cispo_jax.truncated_importance_weights(old, rollout)
    assert_close(weights[0, :4], [1.0, 2.0, np.exp(-0.5), 2.0])
    assert_close(cispo_jax.truncated_importance_weights(old, rollout, cap=10.0)[0, 1], np.exp(2.0))
    assert not jax.grad(lambda x: cispo_jax.truncated_importance_weights(x, rollout).sum())(jnp.zeros((1, 5))).any()
    loss = LOSSES["cispo"](old, old, jnp.ones(1), jnp.array([[1, 1, 1, 1, 0]]), token_weights=weights)[0]
    assert_close(loss, (1 + 2 + np.exp(-0.5)) / 4)
