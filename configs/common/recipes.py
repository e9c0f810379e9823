"""Batches, updates and rates of the pages: each function sets `config.sampling`, `config.objective` and `config.optimizer`."""


def sixteen_updates(config):
    """128 responses a step and 16 updates, one for each prompt's group: every token is used once (DAPO's reading of "16 rounds")."""
    config.sampling.prompts_per_step = 16
    config.sampling.group_size = 8
    config.objective.num_minibatches = 16
    config.optimizer.learning_rate = 5e-6


def four_updates(config, *, prompts_per_step, learning_rate):
    """Groups of 8 and 4 updates a step, every token used once."""
    config.sampling.prompts_per_step = prompts_per_step
    config.sampling.group_size = 8
    config.objective.num_minibatches = 4
    config.optimizer.learning_rate = learning_rate
