"""CISPO on one task in one file, without a config: read it top to bottom to see the whole method.

    python -m experiments.minimal

A random two-layer transformer answers sums of two digits (`configs/debug.py` is the same run through the trainer, and a test holds
their losses against each other). Every function used is public: swap the model, the reward or the loss for your own.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cispo_jax
from cispo_jax import data, models, rewards
from cispo_jax.config import DataSettings
from cispo_jax.data.tokenizers import character_tokenizer
from cispo_jax.models import PRESETS, Transformer
from cispo_jax.sampling import sample_groups

PROMPTS, GROUP_SIZE, MINIBATCHES = 8, 8, 4  # 8 prompts x 8 responses a step, split into 4 updates of whole groups
MAX_NEW_TOKENS, TEMPERATURE, LEARNING_RATE, SEED = 6, 1.0, 1e-3, 0


def make_task():
    """Problems with a prompt and an answer, the order they come in, and their tokens."""
    settings = DataSettings(
        options={"wording": "{expression}=", "min_value": 0, "max_value": 9},
        template="raw",
        train_size=64,
        eval_size=16,
        max_prompt_tokens=8,
    )
    tokenizer = character_tokenizer("0123456789+-= ")
    problems = data.load(settings)
    encode = data.Prompter(settings, tokenizer).encode
    width = max(len(encode(example)) for part in (problems.train, problems.evaluation) for example in part)
    return tokenizer, data.PromptStream(problems.train, SEED), encode, width


def log_probs_and_entropy(model, tokens, padding_mask):
    """log pi of the response tokens [B, T], and the entropy there. Position t predicts token t + 1: that is the only shift."""
    hidden = models.hidden_states(model, tokens, padding_mask).hidden_BTD[:, -MAX_NEW_TOKENS - 1 : -1]
    return cispo_jax.fused_token_log_probs(
        hidden, models.head_matrix(model), tokens[:, -MAX_NEW_TOKENS:], temperature=TEMPERATURE
    )


optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-15), optax.scale(-LEARNING_RATE)
)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def update(model, optimizer_state, tokens, padding_mask, loss_mask, advantages, old_log_probs):
    """One of the many updates that reuse a batch: the ratio moves away from 1, the weight is clipped, every token stays."""

    def loss_fn(model):
        log_probs, _ = log_probs_and_entropy(model, tokens, padding_mask)
        return cispo_jax.cispo_loss(log_probs, old_log_probs, advantages, loss_mask, epsilon_high=4.0)

    (loss, metrics), gradient = jax.value_and_grad(loss_fn, has_aux=True)(model)
    updates, optimizer_state = optimizer.update(gradient, optimizer_state, model)
    return jax.tree.map(jnp.add, model, updates), optimizer_state, loss, metrics


def main(num_steps: int = 3) -> list[float]:
    """Trains for `num_steps` rollout steps and returns the mean loss of each step's updates."""
    tokenizer, stream, encode, width = make_task()
    config = dataclasses.replace(PRESETS["debug"], vocab_size=tokenizer.vocab_size)
    model = jax.jit(lambda key: Transformer(config, key=key))(jax.random.key(SEED))
    optimizer_state = optimizer.init(model)
    old_policy = jax.jit(lambda *arrays: log_probs_and_entropy(*arrays)[0])
    losses = []
    for step in range(1, num_steps + 1):
        # Sample a group of responses to each prompt.
        ids = range((step - 1) * PROMPTS, step * PROMPTS)
        examples = [stream[i] for i in ids]
        rollout = sample_groups(
            model,
            [encode(example) for example in examples],
            group_size=GROUP_SIZE,
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=TEMPERATURE,
            eos_ids=tokenizer.eos_ids,
            seed=SEED,
            step=step,
            prompt_ids=ids,
            prompt_width=width,
        )

        # Score them; the advantage of a response is relative to its group.
        score = rewards.exact_match(
            [tokenizer.decode(ids) for ids in rollout.responses()],
            examples=[example for example in examples for _ in range(GROUP_SIZE)],
            finish_reasons=rollout.finish_reasons,
            response_tokens=rollout.lengths.tolist(),
        )
        rewards_PG = np.array(score, np.float32).reshape(PROMPTS, GROUP_SIZE)
        advantages = np.asarray(cispo_jax.group_relative_advantages(rewards_PG))

        # Leave out groups without a signal (dynamic sampling) and spread the others over the mini-batches.
        live = rewards_PG.max(axis=1) > rewards_PG.min(axis=1)
        groups = np.argsort(~live, kind="stable").reshape(-1, MINIBATCHES).T  # [MINIBATCHES, groups of one]

        # The denominator of the ratio is frozen once for all updates of this batch.
        tokens = np.concatenate([rollout.prompt_tokens, rollout.response_tokens], axis=1)
        padding_mask = np.concatenate([rollout.prompt_mask, rollout.response_mask], axis=1)
        old_log_probs = np.asarray(old_policy(model, tokens, padding_mask))

        step_losses = []
        for minibatch in groups:
            rows = (minibatch[:, None] * GROUP_SIZE + np.arange(GROUP_SIZE)).ravel()
            loss_mask = rollout.loss_mask[rows] & np.repeat(live[minibatch], GROUP_SIZE)[:, None]
            if loss_mask.any():
                arrays = (tokens[rows], padding_mask[rows], loss_mask, advantages.ravel()[rows], old_log_probs[rows])
                model, optimizer_state, loss, _ = update(model, optimizer_state, *arrays)
                step_losses.append(float(loss))
        losses.append(float(np.mean(step_losses)) if step_losses else 0.0)
        print(
            f"step {step}  reward {rewards_PG.mean():.3f}  groups with a signal {live.sum()}/{PROMPTS}  loss {losses[-1]:+.6f}"
        )
    return losses


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main(20)
