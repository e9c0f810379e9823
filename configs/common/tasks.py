"""Problems of the pages: each function sets `config.data`."""

import os


def sums(config, *, min_value, max_value, operations="+-", wording="What is {expression}?"):
    """Sums and differences of two numbers, no result below zero; pairs of operands are in training or held out, never in both."""
    config.data.source = "arithmetic"
    config.data.options.operations = operations
    config.data.options.wording = wording
    config.data.options.min_value = min_value
    config.data.options.max_value = max_value


def worked_sums(config, *, terms):
    """Sums of `terms` numbers from 0 to 10 (reasoning-gym); the prompt shows two, worked out line by line."""
    config.data.source = "reasoning_gym:basic_arithmetic"
    config.data.options.min_terms = terms
    config.data.options.max_terms = terms
    config.data.options.max_digits = 1
    config.data.options.operators = ["+"]
    config.data.options.allow_parentheses = False
    config.data.template = os.path.join(os.path.dirname(__file__), "worked_sums.jinja")
