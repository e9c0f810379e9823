"""From a problem to the text and the tokens that the model is given."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cispo_jax.config import ConfigError, DataSettings, suggest

if TYPE_CHECKING:  # a Prompter is handed its tokenizer; building one is what loads the tokenizers package
    from cispo_jax.data.tokenizers import Tokenizer

logger = logging.getLogger(__name__)


class Prompter:
    """Builds prompts as the `data` settings say: template, system_prompt, prompt_suffix, template_kwargs.

    The problem's text is `example["prompt"]` followed by the suffix, on a new line unless the suffix begins with a
    space or a line break itself. Then the template:
      chat    the tokenizer's chat template with one user turn, and a system turn only if `system_prompt` is set: the
              system turn that some templates add by themselves (SmolLM2's, Qwen2.5's) is left out. To have it, write
              its text in `system_prompt`.
      raw     the text as it is.
      a path  a jinja file of one's own, given `prompt` (suffix included), `messages`, `system_prompt`, `example`,
              `add_generation_prompt` (true), the tokenizer's special tokens and `template_kwargs`. As everywhere in
              jinja, one line break at the end of the file is dropped and an unknown name is empty text.
    """

    def __init__(self, settings: DataSettings, tokenizer: Tokenizer):
        self._settings = settings
        self._tokenizer = tokenizer
        template = settings.template
        if template == "chat" and tokenizer.chat_template is None:
            raise ConfigError(
                "config.data.template=chat, but this tokenizer has no chat template; use raw or a .jinja file."
            )
        if template == "raw" and (settings.system_prompt or settings.template_kwargs):
            raise ConfigError("config.data.template=raw has no place for system_prompt or template_kwargs; unset them.")
        if settings.long_prompts not in ("refuse", "filter"):
            raise ConfigError(f"config.data.long_prompts={settings.long_prompts!r} is neither refuse nor filter.")
        self._source = None if template in ("chat", "raw") else _read_template(template)

    def text(self, example: dict[str, Any]) -> str:
        """The prompt as text, special tokens included."""
        settings = self._settings
        suffix = example.get("prompt_suffix", settings.prompt_suffix)  # tasks of a mixture may have their own
        system = example.get("system_prompt", settings.system_prompt)
        prompt = example["prompt"] + ("\n" if suffix and not suffix[0].isspace() else "") + suffix
        if settings.template == "raw":
            return prompt
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        kwargs = dict(settings.template_kwargs)
        if self._source is None:
            render = self._tokenizer.render if system else self._tokenizer.render_without_default_system
            return render(messages, **kwargs)
        from cispo_jax.data.tokenizers import render_template

        names = {"prompt": prompt, "messages": messages, "system_prompt": system, "example": example}
        variables = {**self._tokenizer.special_tokens, "add_generation_prompt": True, **names, **kwargs}
        try:
            return render_template(self._source, **variables)
        except ConfigError as error:
            raise ConfigError(
                f"config.data.template={settings.template}, example {example.get('id')!r}: {error}"
            ) from error

    def encode(self, example: dict[str, Any]) -> list[int]:
        """The prompt as token ids."""
        return self._tokenizer.encode(self.text(example))

    def check(self, examples: Sequence[dict[str, Any]], name: str = "config.data.source") -> Sequence[dict[str, Any]]:
        """The examples whose prompt fits `config.data.max_prompt_tokens` after templating; nothing is ever cut.

        Raises:
          ConfigError: a prompt is too long and `config.data.long_prompts=refuse`, none fits, or a prompt has no token.
        """
        limit = self._settings.max_prompt_tokens
        lengths = [len(self.encode(example)) for example in examples]
        if len(examples) > 1 and len({self.text(example) for example in examples}) == 1:
            raise ConfigError(
                f"config.data.template={self._settings.template}: all {len(examples)} prompts are the same; a problem's text is "
                "{{ prompt }} in a template."
            )
        if 0 in lengths:
            raise ConfigError(f"{name}: the prompt of example {examples[lengths.index(0)]['id']!r} has no token.")
        kept = [index for index, length in enumerate(lengths) if length <= limit]
        if len(kept) == len(lengths):
            return examples
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        problem = (
            f"{len(lengths) - len(kept)} of {len(lengths)} prompts are longer than "
            f"config.data.max_prompt_tokens={limit} after templating; "
            f"the longest ({examples[longest]['id']!r}) has {lengths[longest]} tokens"
        )
        if self._settings.long_prompts == "refuse" or not kept:
            raise ConfigError(
                f"{name}: {problem}. Raise the limit or set config.data.long_prompts=filter to leave them out."
            )
        logger.warning("%s: %s. They are left out.", name, problem)
        return [examples[index] for index in kept]


def _read_template(path: str) -> str:
    import jinja2
    import jinja2.meta

    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"config.data.template={path!r} must be chat, raw or the path of a jinja file, and there is no "
            f"file {file.resolve()}.{suggest(path, ['chat', 'raw'])}"
        )
    try:
        source = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"config.data.template={path} is not UTF-8 text: {error}.") from None
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        environment.compile(source)  # also knows the filters
        tree = environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"config.data.template={path}, line {error.lineno}: {str(error.message).rstrip('.')}."
        ) from error
    used = sorted(jinja2.meta.find_undeclared_variables(tree))
    if not {"prompt", "messages", "example"} & set(used):  # else a typo would give every problem the same prompt
        raise ConfigError(
            f"config.data.template={path} uses none of prompt, messages, example: every prompt would be the same; "
            f"it uses: {', '.join(used) or 'no variable'}."
        )
    return source
