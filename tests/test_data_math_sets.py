"""Public sets of mathematical problems, from small files in their published shapes with invented content."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cispo_jax.config import ConfigError, DataSettings
from cispo_jax.data import load, load_evaluation
from cispo_jax.data.math_sets import DAPO_AFTER, DAPO_BEFORE, SETS
from cispo_jax.rewards.math import answer_line_reward, math_reward


def dapo(i, answer, text=None):
    content = DAPO_BEFORE + (text or f"What is √{i} squared?") + DAPO_AFTER
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"uuid-{i}"},
    }


ROWS = {
    "dapo_math": [dapo(i, str(i)) for i in range(12)],
    "gsm8k": [
        {"question": f"Ann has {i} pens and buys {i}.", "answer": f"{i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}"}
        for i in range(12)
    ],
    "math_500": [
        {
            "problem": f"Halve ${i}$.",
            "solution": "By two.",
            "answer": rf"\frac{{{i}}}{{2}}",
            "subject": "Algebra",
            "level": 2,
            "unique_id": f"test/algebra/{i}.json",
        }
        for i in range(12)
    ],
    "aime_2024": [
        {"ID": f"2024-I-{i}", "Problem": f"Find ${i}$.", "Solution": "Look.", "Answer": i} for i in range(12)
    ],
    "aime_2025": [{"id": i, "problem": f"Find ${i}$ again.", "answer": f"{i:03d}"} for i in range(12)],
}
FIRST = {
    "dapo_math": ("What is √0 squared?", "0", "uuid-0", {"data_source": "math_dapo", "ability": "MATH"}),
    "gsm8k": ("Ann has 0 pens and buys 0.", "0", "f-1", {"solution": "0+0=<<0+0=0>>0"}),
    "math_500": ("Halve $0$.", r"\frac{0}{2}", "test/algebra/0.json", {"solution": "By two.", "subject": "Algebra", "level": 2}),
    "aime_2024": ("Find $0$.", "0", "2024-I-0", {"solution": "Look."}),
    "aime_2025": ("Find $0$ again.", "000", "0", {}),
}  # fmt: skip


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", SETS)
def test_each_set_yields_its_examples(name, suffix, tmp_path):
    path = write(tmp_path / f"f{suffix}", ROWS[name])
    settings = DataSettings(source=f"{name}:{path}", eval_size=2, directory=str(tmp_path / "sets"))
    problems = load(settings)
    found = sorted([*problems.train, *problems.evaluation], key=lambda e: (len(e["id"]), e["id"]))
    assert len(problems.train) == 10 and len(problems.evaluation) == 2
    prompt, answer, key, metadata = FIRST[name]
    assert (found[0]["prompt"], found[0]["answer"], found[0]["id"]) == (prompt, answer, key)
    assert json.loads(found[0]["metadata"]) == metadata
    assert all(type(value) is str for example in found for value in example.values())
    assert problems.scorer is (answer_line_reward if name == "dapo_math" else math_reward)
    right = [f"Answer: {e['answer']}" for e in found]
    assert problems.scorer(right, examples=found) == [1.0] * 12
    again = load(settings)  # from what TFDS wrote, whatever becomes of the parser
    assert list(again.train) == list(problems.train)
    assert SETS[name].citation and SETS[name].homepage.startswith("https://")


def test_repeated_problems_are_dropped_and_counted(tmp_path):
    """17k problems a hundred times each: 12 of 1,200 rows are left (O-36)."""
    path = write(tmp_path / "f.parquet", ROWS["dapo_math"] * 100)
    problems = load(DataSettings(source=f"dapo_math:{path}", eval_size=2, directory=str(tmp_path / "s")))
    assert len(problems.train) + len(problems.evaluation) == 12
    assert "1,188 duplicates dropped (of 1,200 rows)" in problems.description


def test_a_changed_file_is_another_set(tmp_path):
    settings = lambda: DataSettings(source=f"gsm8k:{path}", eval_size=2, directory=str(tmp_path / "s"))
    path = write(tmp_path / "f.jsonl", ROWS["gsm8k"])
    assert len(load(settings()).train) == 10
    write(tmp_path / "f.jsonl", ROWS["gsm8k"][:6])
    assert len(load(settings()).train) == 5


def test_aime_as_the_authors_of_dapo_publish_it(tmp_path):
    path = write(tmp_path / "f.parquet", [dapo(i, f"{i:03d}") for i in range(3)] * 32)
    found, scorer = load_evaluation(f"aime_2024:{path}", DataSettings(directory=str(tmp_path / "s")), "here")
    assert [e["answer"] for e in found] == ["000", "001", "002"] and scorer is math_reward
    assert scorer([r"\boxed{1}"] * 3, examples=found) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "name, row, message",
    [
        ("dapo_math", {"prompt": "text"}, r"row 2, field 'prompt' must be a chat"),
        ("dapo_math", dapo(1, "1") | {"reward_model": {"style": "x"}}, r"has no field 'reward_model.ground_truth'"),
        ("dapo_math", dapo(1, "1") | {"reward_model": None}, r"has no field 'reward_model'"),
        ("gsm8k", {"question": "q", "answer": "no mark"}, r"line 2, field 'answer' must end in '#### '"),
        (
            "gsm8k",
            {"qeustion": "q", "answer": "#### 1"},
            r"line 2 has no field 'question'. Did you mean \"qeustion\"\?",
        ),
        ("gsm8k", {"question": " ", "answer": "#### 1"}, r"line 2, field 'prompt' is empty"),
        ("math_500", {"problem": "p", "solution": "s"}, r"line 2 has no field 'answer'"),
        ("math_500", {"problem": "p", "answer": ["a"]}, r"line 2, field 'answer' is \['a'\]"),
        ("aime_2024", {"Problem": "p", "Answer": "x+1"}, r"integers from 000 to 999"),
        ("aime_2024", {"Problem": "p", "Answer": 1000}, r"integers from 000 to 999"),
        ("aime_2025", {"answer": 3}, r"line 2 has no field 'question'"),
    ],
)
def test_a_row_of_another_shape_is_named(name, row, message, tmp_path):
    if name == "dapo_math":  # a table has one type a column
        path = tmp_path / "f.jsonl"
        message = message.replace("row 2", "line 2")
    path = write(tmp_path / "f.jsonl", [ROWS[name][0], row])
    with pytest.raises(ConfigError, match=message) as error:
        load(DataSettings(source=f"{name}:{path}", directory=str(tmp_path / "s")))
    assert "f.jsonl" in str(error.value)


def test_the_same_id_with_different_golds_is_refused(tmp_path):
    path = write(tmp_path / "f.jsonl", [dapo(1, "1"), dapo(1, "2")])
    with pytest.raises(ConfigError, match="the same prompt with different answers"):
        load(DataSettings(source=f"dapo_math:{path}", directory=str(tmp_path / "s")))
    path = write(tmp_path / "g.jsonl", [dapo(1, "1"), dapo(1, "2", "another")])
    with pytest.raises(ConfigError, match="the same id 'uuid-1'"):
        load(DataSettings(source=f"dapo_math:{path}", directory=str(tmp_path / "s")))


@pytest.mark.parametrize("content, message", [(b"", "holds no row"), (b"PAR1 not", "cannot be read as Parquet")])
def test_an_empty_or_corrupt_file_is_named(content, message, tmp_path):
    suffix = ".parquet" if content else ".jsonl"
    path = tmp_path / f"f{suffix}"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(DataSettings(source=f"gsm8k:{path}", directory=str(tmp_path / "s")))
    path.write_text(json.dumps(ROWS["gsm8k"][0]) + "\n") if suffix == ".jsonl" else write(path, ROWS["gsm8k"])
    # Nothing half-written is left behind that the next start would read.
    if suffix == ".parquet":
        assert len(load(DataSettings(source=f"gsm8k:{path}", eval_size=2, directory=str(tmp_path / "s"))).train) == 10


def test_an_unknown_set_is_refused_with_the_nearest_name():
    for settings, setting in (
        (DataSettings(source="gsm9k:a/f.jsonl"), "config.data.source=gsm9k:a/f.jsonl"),
        (DataSettings(eval_source="gsm9k:a/f.jsonl"), "config.data.eval_source"),
    ):
        with pytest.raises(ConfigError, match=r"there is no set 'gsm9k'. Did you mean \"gsm8k\"") as error:
            load(settings)
        assert setting in str(error.value)
