"""Every setting of a run, once, with its unit: the frozen dataclasses that a config page turns into.

A config page (`configs/*.py`) returns an `ml_collections.ConfigDict` made by `default_config()` and changed by the page and by
`--config.section.key=value`. The launcher calls `from_config_dict` once; below it nobody sees a `ConfigDict`. Every problem is a
`ConfigError` that names the setting, its value and the valid values, raised before any device work; the launcher exits with code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """Bad settings or bad input from a user: shown as one paragraph without a traceback, exit code 2."""


def suggest(name: str, valid: Iterable[str]) -> str:
    """' Did you mean "x"?' for the closest valid name, or nothing."""
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f' Did you mean "{close[0]}"?' if close else ""


@dataclass(frozen=True)
class ModelSettings:
    preset: str = (
        "smollm2-135m"  # architecture (cispo_jax.models.PRESETS); weights that bring their own architecture override it
    )
    weights: str = ""  # "" = random; a model folder, hf:org/name@revision, a .gguf file, package:NAME (a .gguf in a Python package)
    tokenizer: str = ""  # "" = the weights' own; characters:ABC = one token a character; a tokenizer.json, or a model as in `weights`
    dtype: str = "float32"  # compute dtype: float32 | bfloat16; parameters, optimizer, head and softmax stay float32
    remat: str = (
        "full"  # what the backward pass computes again: full = each layer (a third more compute) | attention | off
    )
    attention: str = (
        "auto"  # of whole sequences in training: blocks (any device) | splash (TPU) | cudnn (NVIDIA GPU, not packed)
    )


@dataclass(frozen=True)
class SamplingMeshSettings:
    """The same devices while they sample; what is left of them splits the prompts, and every one holds a whole copy of the rest."""

    expert: int = 0  # devices that split the experts; 0 = as in training
    tensor: int = 0  # devices that split heads, feed-forward and vocabulary; 0 = as in training


@dataclass(frozen=True)
class MeshSettings:
    data: int = 1  # devices that split the batch and replicate the parameters; -1 = what is left
    fsdp: int = -1  # devices that split the batch and the parameters
    expert: int = 1  # devices that split the experts (and the batch outside them)
    tensor: int = 1  # devices that split heads, feed-forward and vocabulary
    sampling: SamplingMeshSettings = field(default_factory=SamplingMeshSettings)


@dataclass(frozen=True)
class DataSettings:
    # arithmetic | reasoning_gym:TASK | a .jsonl or .parquet file, hf:org/name@revision:FILE | gsm8k:FILE, dapo_math:FILE, ... | mixture
    source: str = "arithmetic"
    # With source=mixture: NAME -> its own settings of this section (source, options, ...), weight, and levels of difficulty (a list of
    # options) with advance_at (share of passed responses) and window (prompts); see cispo_jax/data/mixture.py
    tasks: Mapping[str, Any] = field(default_factory=dict)
    retire_at: float = 0.0  # a prompt passed in this share of its responses does not come again (ScaleRL: 0.9); 0 = off
    options: Mapping[str, Any] = field(default_factory=dict)  # the generator's own settings, e.g. max_value
    eval_source: str = ""  # "" = held out from `source`; else a file of evaluation problems
    train_size: int = 4096  # problems to generate for training; a file is used whole
    eval_size: int = 256  # held-out problems
    seed: int = 0  # of the generator (the run's `seed` orders and samples)
    directory: str = ""  # where generated TFDS data sets are kept; "" = TFDS's own default
    template: str = "chat"  # chat = the tokenizer's chat template | raw = the prompt as it is | path of a .jinja file
    system_prompt: str = ""  # "" = no system turn
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # handed to the template
    prompt_suffix: str = ""  # added to every problem before templating, e.g. an instruction
    prompt_field: str = "prompt"  # column names of a file
    answer_field: str = "answer"
    max_prompt_tokens: int = 256  # after templating
    long_prompts: str = "refuse"  # what to do with longer ones: refuse | filter (counted in the log)


@dataclass(frozen=True)
class RewardSettings:
    """Free names: `--config.rewards.NAME=module_or_file:function` adds a reward function; the total is the sum over all of them."""

    functions: Mapping[str, str] = field(default_factory=dict)  # NAME -> module_or_file:function
    task: str = "auto"  # the data set's own scorer: auto = only if no function is named | on | off
    verifier: str = (
        "auto"  # what that scorer is: auto = the data set's choice | exact | math | answer_line (DAPO's "Answer:")
    )
    format: str = ""  # a part `format`, 1 for the right form: boxed | answer_line | answer_tag | think; "" = none
    repetition_ngram: int = (
        0  # a part `repetition`: minus the share of n-grams of so many words that were there before; 0 = off
    )
    weights: Mapping[str, float] = field(
        default_factory=dict
    )  # NAME of a part -> its factor in the total (1 where it is not named)
    workers: int = 0  # processes that score, so many groups at a time; 0 = inline
    timeout: float = (
        0.0  # seconds that one function may take for one group of responses, which is left unscored then; 0 = no limit
    )
    overlong_buffer: int = 0  # tokens before max_new_tokens where DAPO's soft penalty grows; 0 = off
    overlong_penalty: float = 1.0  # subtracted in full at the limit


@dataclass(frozen=True)
class SamplingSettings:
    prompts_per_step: int = 16  # P: prompts of one rollout batch
    group_size: int = 8  # G: responses of each prompt
    max_new_tokens: int = 64  # T: response tokens, the EOS included
    # Rollout step -> limit of a response from then on, at most max_new_tokens, as in {"1": 40_000, "500": 80_000} (MiniMax-M1)
    length_schedule: Mapping[str, int] = field(default_factory=dict)
    slots: int = 0  # responses decoded at a time: one that ends makes room for the next; 0 = as many as memory holds
    sync_tokens: int = 64  # with slots: tokens of a response between two looks of the host
    repetition_stop: int = (
        0  # end a response after so many tokens in a row of probability above 0.99 (MiniMax-M1: 3,000); 0 = off
    )
    temperature: float = 1.0
    top_p: float = 1.0  # must be 1 in training (the ratio would be biased)
    top_k: int = 0  # 0 = off; must be 0 in training
    dynamic: bool = True  # leave out groups whose rewards are all equal (DAPO's dynamic sampling)
    max_refills: int = 0  # further batches of prompts to replace groups that were left out
    shuffle_rewards: bool = False  # control experiment: permute the rewards within the batch; nothing can be learned

    def limit(self, step: int) -> int:
        """Tokens of a response at most in a rollout step (from 1)."""
        begun = [int(start) for start in self.length_schedule if int(start) <= step]
        return self.length_schedule[str(max(begun))] if begun else self.max_new_tokens


@dataclass(frozen=True)
class ObjectiveSettings:
    name: str = "cispo"  # cispo | reinforce | ppo | grpo | dapo | gspo | unified | module_or_file:function
    epsilon_low: float | None = None  # lower bound of the ratio is 1 - epsilon_low; None = the objective's own default
    epsilon_high: float | None = None  # upper bound is 1 + epsilon_high; None = the objective's own default
    mask_epsilon_low: float | None = None  # unified only (Eq. 5): the mask's own range
    mask_epsilon_high: float | None = None
    aggregation: str | None = None  # token | prompt | sequence | constant; None = the objective's own default
    num_minibatches: int = 16  # a rollout batch is split into so many mini-batches of whole groups ...
    num_epochs: int = 1  # ... and passed over so many times: updates a step = num_minibatches x num_epochs
    packing: bool = (
        True  # responses of any length share rows without padding; False: one a row, padded to max_new_tokens
    )
    micro_batch_tokens: int = 0  # of one device in one forward and backward pass, at least one row; 0 = chosen
    anchor: str = (
        "old"  # denominator of the ratio: old = a forward pass of the trainer | rollout = the sampler's record
    )
    advantage: str = "group"  # group (mean of the group) | rloo (mean of the others)
    advantage_scale: str = "group"  # divide by the standard deviation of the group | batch | none
    train_truncated: bool = True  # False: responses that hit max_new_tokens leave the loss
    truncated_importance_cap: float | None = None  # multiply by min(old / rollout, cap); refused with anchor=rollout
    kl: float = (
        0.0  # coefficient of a penalty for leaving the starting weights, kept as a frozen reference policy; 0 = off
    )
    kl_estimator: str = "k3"  # k1 | k2 | k3 (GRPO)
    load_balance: float = 0.0  # coefficient of the routers' load-balance loss (mixture of experts); 0 = off
    router_z: float = 0.0  # coefficient of the routers' z-loss; 0 = off
    routing_replay: bool = False  # train on the experts that the sampler chose (R3); gates and gradients are today's


@dataclass(frozen=True)
class OptimizerSettings:
    learning_rate: float = 1e-6  # peak
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-15  # MiniMax-M1; use 1e-8 where a parameter's true gradient is zero
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # global norm; 0 = no clipping
    schedule: str = "constant"  # after the warm-up: constant | linear | cosine (both to 0 at the end of the run)
    warmup: int = 0  # length of the linear warm-up in units of ...
    warmup_unit: str = "rollout_steps"  # ... rollout_steps | updates


@dataclass(frozen=True)
class SftSettings:
    num_steps: int = 0  # supervised updates before RL; 0 = no warm start
    batch_size: int = 64  # demonstrations an update
    learning_rate: float = 1e-3  # peak; 5 % warm-up, then cosine to 0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class EvaluationSettings:
    every: int = 5  # rollout steps between evaluations; 0 = only before and after
    num_problems: int = 256  # of the held-out set; 0 = all
    samples: int = 0  # k of avg@k, sampled at `temperature`; 0 = greedy only
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    batch_rows: int = 128  # responses decoded at a time
    # Further benchmarks: NAME -> source, and what differs from above or from `data` (samples, temperature, top_p, top_k, num_problems,
    # verifier, prompt_suffix, system_prompt, prompt_field, answer_field); their metrics are eval/NAME/...
    sets: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSettings:
    every: int = 5  # rollout steps; the last step is always saved
    keep: int = 2  # newest checkpoints kept


@dataclass(frozen=True)
class LoggingSettings:
    tensorboard: bool = True
    wandb: str = ""  # project name; "" = off
    samples: int = 0  # responses of a step written to rollouts/; 0 = all


@dataclass(frozen=True)
class ProfileSettings:
    steps: str = ""  # "3:5" = trace rollout steps 3 and 4 into WORKDIR/profile


@dataclass(frozen=True)
class Config:
    seed: int = 0  # order of the prompts, sampled tokens, random weights
    num_steps: int = 10  # rollout steps
    model: ModelSettings = field(default_factory=ModelSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    data: DataSettings = field(default_factory=DataSettings)
    rewards: RewardSettings = field(default_factory=RewardSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)
