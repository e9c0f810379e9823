"""Float64 NumPy oracles, token by token from the equations, sharing no code and no trick with the library.

Each returns the value and its derivative by the current log-probs, worked out by hand (stop-gradient factors are constants).
"""

import math

import numpy as np


def ratio(log_prob, old_log_prob):
    return math.exp(min(max(log_prob - old_log_prob, -80.0), 80.0))


def clip(r, low, high):
    """Epsilon offsets, None = off."""
    if high is not None:
        r = min(r, 1 + high)
    return r if low is None else max(r, 1 - low)


def dropped(r, advantage, low, high):
    return (advantage > 0 and high is not None and r > 1 + high) or (advantage < 0 and low is not None and r < 1 - low)


def token_term(name, log_prob, r, advantage, settings):
    """(term to maximise, its derivative by log_prob) for one token."""
    low, high = settings.get("epsilon_low"), settings.get("epsilon_high")
    if name == "reinforce":
        return r * advantage * log_prob, r * advantage
    if name == "cispo":
        weight = clip(r, low, high)
        return weight * advantage * log_prob, weight * advantage
    if name == "unified":
        weight = clip(r, *(settings.get("weight_clip") or (None, None)))
        keep = not dropped(r, advantage, *(settings.get("mask_clip") or (None, None)))
        return keep * weight * advantage * log_prob, keep * weight * advantage
    assert name in ("ppo", "grpo", "dapo", "gspo"), name
    term = min(r * advantage, clip(r, low, high) * advantage)
    return term, 0.0 if dropped(r, advantage, low, high) else r * advantage


def loss_and_gradient(
    name,
    log_probs,
    old_log_probs,
    advantages,
    loss_mask,
    *,
    aggregation,
    group_ids=None,
    segment_ids=None,
    token_weights=None,
    normalizer=None,
    **settings,
):
    rows, columns = np.shape(log_probs)
    response = np.ones((rows, columns), int) if segment_ids is None else np.asarray(segment_ids)
    tokens = [(b, t) for b in range(rows) for t in range(columns) if loss_mask[b][t] and response[b, t] != 0]
    where = {  # token -> the unit that is averaged over first
        "token": lambda b, t: (b, t),
        "constant": lambda b, t: (b, t),
        "sequence": lambda b, t: (b, response[b, t]),
        "prompt": lambda b, t: group_ids[b] if np.ndim(group_ids) == 1 else group_ids[b][t],
    }[aggregation]
    units, responses = {}, {}
    for b, t in tokens:
        units.setdefault(where(b, t), []).append((b, t))
        responses.setdefault((b, response[b, t]), []).append((b, t))
    denominator = normalizer if normalizer is not None else len(units)
    total, gradient = 0.0, np.zeros((rows, columns))
    for b, t in tokens:
        advantage = float(advantages[b] if np.ndim(advantages) == 1 else advantages[b][t])
        log_prob = float(log_probs[b][t])
        if name == "gspo":
            log_ratios = [float(log_probs[i][j]) - float(old_log_probs[i][j]) for i, j in responses[b, response[b, t]]]
            r = ratio(math.fsum(log_ratios) / len(log_ratios), 0.0)
        else:
            r = ratio(log_prob, float(old_log_probs[b][t]))
        term, derivative = token_term(name, log_prob, r, advantage, settings)
        scale = 1.0 if token_weights is None else float(token_weights[b][t])
        scale /= len(units[where(b, t)]) * denominator
        total -= scale * term
        gradient[b, t] = -scale * derivative
    return total, gradient


def group_advantages(rewards, valid, scale, ddof, epsilon):
    rewards = np.asarray(rewards, np.float64)
    centred = np.zeros(rewards.shape)
    for p, row in enumerate(valid):
        if row.any():
            centred[p, row] = rewards[p, row] - rewards[p, row].mean()
    if scale is None:
        return centred
    result = np.zeros(rewards.shape)
    batch_std = math.sqrt((centred**2).sum() / max(valid.sum() - ddof, 1))
    for p, row in enumerate(valid):
        std = batch_std if scale == "batch" else math.sqrt((centred[p] ** 2).sum() / max(row.sum() - ddof, 1))
        result[p] = centred[p] / (std + epsilon)
    return result


def token_log_probs(logits, tokens):
    """Log-probs and entropies of [N, V] logits at [N] tokens, and the logits' derivatives of both, [N, V] each."""
    logits = np.asarray(logits, np.float64)
    log_p = logits - logits.max(-1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(-1, keepdims=True))
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(-1)
    one_hot = np.eye(logits.shape[-1])[tokens]
    return (log_p * one_hot).sum(-1), entropy, one_hot - p, -p * (log_p + entropy[:, None])
