"""Text <-> token ids, and conversations -> prompts, through a model's own tokenizer and chat template.

Everything here is plain Python on the `tokenizers` library and jinja2. Three rules, each from trainers that broke it:
the ids that the sampler drew are trained on, text is decoded from them and never encoded back; the end of a response is
a set of ids; which tokens are padding is known from lengths, never from a token's value (`pad_id` may be an EOS id).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import tokenizers
from etils import epath
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, pre_tokenizers

from cispo_jax.config import ConfigError

MAX_RENDERED = 1_000_000  # characters: a template that writes more is stopped


class Tokenizer:
    """A tokenizer, the ids that end a response, and the chat template.

    Attributes:
      vocab_size: number of token ids; a model may have more (padded) rows.
      eos_ids: ids that stop generation, in ascending order; may be empty.
      pad_id: the id that fills padding. It has no meaning and may equal an EOS id.
      chat_template: jinja source, None where the model has none.
      special_tokens: what templates may refer to: `bos_token`, `eos_token`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int],
        pad_id: int | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        # A tokenizer.json may come with both switched on; a prompt must never be cut or filled silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_ids: tuple[int, ...] = tuple(sorted(set(eos_ids)))
        self.pad_id: int = pad_id if pad_id is not None else (self.eos_ids or (0,))[0]
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised, none is added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens left out; bytes that are not whole UTF-8 characters become U+FFFD."""
        return self._backend.decode([int(id) for id in ids], skip_special_tokens=True)

    def token(self, id: int) -> str:
        """The vocabulary's own spelling of one token, special or not; "" for an id without one (a padded row)."""
        return self._backend.id_to_token(int(id)) or ""

    def render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """The conversation as the chat template writes it, with the header of the reply (`add_generation_prompt=True`).

        Args:
          messages: [{"role": "user", "content": "..."}, ...].
          **kwargs: further variables for the template, e.g. `enable_thinking=False`.

        Raises:
          ConfigError: there is no template, or it fails on these messages.
        """
        if self.chat_template is None:
            raise ConfigError(
                "config.data.template='chat': this tokenizer has no chat template; use raw or a .jinja file."
            )
        variables = {**self.special_tokens, "messages": list(messages), "add_generation_prompt": True, **kwargs}
        return render_template(self.chat_template, **variables)

    def render_without_default_system(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """`render`, without the system turn that some templates write on their own when the conversation has none.

        SmolLM2's and Qwen2.5's do. The turns are cut out of a rendering with an explicit system turn; where a template
        cannot tell them apart (no system role, or folded into the first message), the text is that of `render`.
        """
        full = self.render(messages, **kwargs)
        if messages and messages[0].get("role") == "system":
            return full
        system = {"role": "system", "content": "system"}
        try:
            head = self.render([system], **{**kwargs, "add_generation_prompt": False})
            whole = self.render([system, *messages], **kwargs)
        except ConfigError:
            return full
        turns = whole.removeprefix(head)
        if turns == whole or not full.endswith(turns):
            return full
        bos = self.special_tokens.get("bos_token", "")
        return turns if turns.startswith(bos) or not full.startswith(bos) else bos + turns


# ---------------------------------------------------------------------------------------------------------------------
# Templates


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    # Templates come with a model file: the sandbox gives them no attribute of Python objects, nothing to change, and
    # ranges of at most 100,000. The options are those of Hugging Face's chat templates. `strftime_now` is undefined on
    # purpose: a prompt must not depend on the day it is rendered; templates then write their fixed date.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def render_template(source: str, **variables: Any) -> str:
    """A jinja template in the sandbox, at most `MAX_RENDERED` characters long; every failure is a `ConfigError`."""
    pieces: list[str] = []
    length = 0
    try:
        for piece in _compile(source).generate(**variables):
            length += len(piece)
            if length > MAX_RENDERED:
                raise jinja2.TemplateError(f"it wrote more than {MAX_RENDERED} characters")
            pieces.append(piece)
    except (
        jinja2.TemplateError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"config.data.template: the chat template failed ({type(error).__name__}: {error})."
        ) from None
    return "".join(pieces)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers

# How text is split before the merges apply; the names are llama.cpp's (`tokenizer.ggml.pre`).
_SPLITS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    # Each digit stands alone, then as GPT-2: SmolLM2's own tokenizer.json.
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
}


def byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[str], *, split: str, special: Sequence[str] = (), added: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """A byte-level BPE (GPT-2's) whose token ids are the positions in `tokens`.

    Args:
      tokens: the vocabulary in the byte alphabet of GPT-2 ("Ġ" for a space).
      merges: pairs "left right", best first.
      split: how text is cut before merging: "gpt-2" | "smollm".
      special: tokens of the vocabulary that are recognised in text and left out by decoding.
      added: tokens of the vocabulary that are recognised in text and decoded.
    """
    if split not in _SPLITS:
        raise ConfigError(
            f"tokenizer.ggml.pre={split!r}: this way of splitting text is not supported; supported: "
            f"{', '.join(_SPLITS)}. Set config.model.tokenizer to the model's tokenizer.json instead."
        )
    vocab = {token: id for id, token in enumerate(tokens)}
    try:
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        model = models.BPE(vocab=vocab, merges=pairs)
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"tokenizer.ggml.merges do not fit the vocabulary ({error}).") from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _SPLITS[split]()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in added])
    return backend


class _CharacterTokenizer(Tokenizer):
    def encode(self, text: str) -> list[int]:
        unknown = sorted({character for character in text if self._backend.token_to_id(character) is None})
        if unknown:
            known = "".join(self.token(id) for id in range(2, self.vocab_size))
            raise ConfigError(
                f"config.model.tokenizer: {', '.join(map(repr, unknown))} in {text[:60]!r}: not in the "
                f"alphabet {known!r}."
            )
        return super().encode(text)


def character_tokenizer(alphabet: str) -> Tokenizer:
    """One token a character, for models trained from nothing: id 0 = "<pad>", 1 = "<eos>", then the alphabet in order.

    `encode` raises `ConfigError` naming the characters that are not in the alphabet.
    """
    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if not alphabet or repeated:
        why = f"it repeats {', '.join(map(repr, repeated))}" if repeated else "it is empty"
        raise ConfigError(
            f"config.model.tokenizer='characters:{alphabet}': the alphabet must be distinct characters; {why}."
        )
    vocab = {token: id for id, token in enumerate(["<pad>", "<eos>", *alphabet])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<eos>"])
    return _CharacterTokenizer(backend, eos_ids=[1], pad_id=0)


_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


def load_tokenizer_json(path: epath.PathLike) -> Tokenizer:
    """A Hugging Face `tokenizer.json`, with what the files beside it say about EOS, padding and the chat template.

    EOS is the union of `generation_config.json` and `tokenizer_config.json`. Where neither says, it is the special
    tokens with the name of an end ("<|im_end|>", "</s>", "<eos>", ...).
    """
    path = epath.Path(path)
    if not path.exists() or path.is_dir():
        raise ConfigError(f"config.model.tokenizer={str(path)!r}: no such file; give the path of a tokenizer.json.")
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text())
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"config.model.tokenizer={str(path)!r} is not a tokenizer.json ({error}).") from None
    config, generation = (_json(path.parent / name) for name in ("tokenizer_config.json", "generation_config.json"))
    names = {key: _content(config.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
    special_tokens = {key: name for key, name in names.items() if name}
    ids = {key: backend.token_to_id(name) for key, name in special_tokens.items()}
    ends = generation.get("eos_token_id")
    ends = list(ends) if isinstance(ends, list) else [ends]
    ends = [id for id in [*ends, ids.get("eos_token")] if id is not None]
    if not ends:
        special = {token.content: id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        ends = [special[name] for name in _END_TOKENS if name in special]
    pad_id = ids.get("pad_token")
    template = config.get("chat_template")
    if (path.parent / "chat_template.jinja").exists():
        template = (path.parent / "chat_template.jinja").read_text()
    elif isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return Tokenizer(
        backend,
        eos_ids=ends,
        pad_id=generation.get("pad_token_id") if pad_id is None else pad_id,
        chat_template=template,
        special_tokens=special_tokens,
    )


def save_tokenizer(tokenizer: Tokenizer, folder: epath.PathLike) -> dict[str, Any]:
    """Writes the tokenizer files of a model folder, for `load_tokenizer_json` and transformers' AutoTokenizer.

    Returns the ids that belong into the model's config.json: bos_token_id, eos_token_id (a list where there are several), pad_token_id.
    """
    folder = epath.Path(folder)
    (folder / "tokenizer.json").write_text(tokenizer._backend.to_str(pretty=True))
    names = {"pad_token": tokenizer.token(tokenizer.pad_id), **tokenizer.special_tokens}
    if tokenizer.eos_ids:
        names.setdefault("eos_token", tokenizer.token(tokenizer.eos_ids[0]))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False))
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template)
    ends = list(tokenizer.eos_ids)
    bos = names.get("bos_token")
    ids = {
        "bos_token_id": None if bos is None else tokenizer._backend.token_to_id(bos),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": tokenizer.pad_id,
    }
    known = {key: value for key, value in ids.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(known, indent=2))
    return ids


def _json(path: epath.Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}).") from None
    return content if isinstance(content, dict) else {}


def _content(token: Any) -> str | None:
    """A special token is written as a string or as an object with its `content`."""
    return token.get("content") if isinstance(token, Mapping) else token
