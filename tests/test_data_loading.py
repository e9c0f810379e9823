"""`data.load`: generated sets on disk and files of problems."""

import json
import os
import signal
import subprocess
import sys
import time

import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds

import cispo_jax
from cispo_jax.config import ConfigError, DataSettings
from cispo_jax.data import builders, load, loading, tasks
from cispo_jax.rewards import exact_match


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(count, **more):
    return [{"prompt": f"What is {n} + 1?", "answer": n + 1, **more} for n in range(count)]


@pytest.fixture
def small(tmp_path):
    return {"train_size": 40, "eval_size": 10, "directory": str(tmp_path / "sets"), "options": {"max_value": 60}}


# ------------------------------------------------------------------------------------------------------- generated sets


def test_arithmetic_is_written_once_and_read_back_as_text(small, monkeypatch):
    problems = load(DataSettings(**small))
    assert (len(problems.train), len(problems.evaluation)) == (40, 10)
    example = problems.train[3]
    assert {name: type(value) for name, value in example.items()} == {
        **dict.fromkeys(["id", "prompt", "answer", "response"], str),
        "operands": list,
    }
    assert all(type(n) is int for n in example["operands"])
    made = tasks.arithmetic(tasks.ArithmeticOptions(max_value=60), train_size=40, eval_size=10, seed=0)
    assert list(problems.train) == made.train and list(problems.evaluation) == made.evaluation
    assert problems.train[-1] == made.train[-1] and problems.train[2:4] == made.train[2:4]
    with pytest.raises(IndexError, match="40 of 40"):
        problems.train[40]
    assert problems.description.startswith("arithmetic: 40 training and 10 held-out problems; in ")
    # The second time nothing is generated.
    monkeypatch.setattr(tasks, "arithmetic", None)
    assert list(load(DataSettings(**small)).train) == made.train


def test_every_setting_that_decides_the_content_has_its_own_set(small):
    variants = [{}, {"seed": 1}, {"train_size": 41}, {"eval_size": 11}, {"options": {"max_value": 61}}]
    sets = [load(DataSettings(**{**small, **variant})) for variant in variants]
    assert len({problems.description.split("; in ")[1] for problems in sets}) == len(variants)
    assert len({json.dumps(list(problems.train)) for problems in sets[:2]}) == 2
    gym = builders.make_config("chain_sum", task="chain_sum", options={}, version="0.1.25", seed=0)
    assert gym.name != builders.make_config("chain_sum", task="chain_sum", options={}, version="0.1.26", seed=0).name


def test_anyone_can_read_the_set_with_tfds_alone(small):
    path = load(DataSettings(**small)).description.split("; in ")[1]
    source = tfds.builder_from_directory(path).as_data_source("train[:10%]")
    assert len(source) == 4 and source[0]["prompt"].startswith(b"What is ")


def test_no_tensorflow_and_no_jax_are_loaded(small):
    code = (
        "import sys; from cispo_jax.config import DataSettings; from cispo_jax.data import load\n"
        f"print(load(DataSettings(**{small!r})).train[0]['id'], {{'tensorflow', 'jax'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=import_path())
    assert done.stdout == "train-000000 set()\n"


def test_reasoning_gym_scorer_and_verdict(small):
    problems = load(DataSettings(**{**small, "source": "reasoning_gym:chain_sum", "options": {"max_terms": 3}}))
    example = problems.evaluation[0]
    assert set(example) == {"id", "prompt", "answer", "metadata"}
    assert problems.scorer([example["answer"], "x"], examples=[example] * 2) == [1.0, 0.0]
    assert problems.verdict(f"Answer: {example['answer']}", example) == "right"
    assert problems.verdict("hm", example) == "no number"


def test_duplicates_of_a_generator_are_counted(small):
    options = {"max_terms": 2, "max_digits": 1}
    settings = DataSettings(**{**small, "source": "reasoning_gym:chain_sum", "options": options, "train_size": 500})
    for _ in range(2):  # generated, then read
        text = load(settings).description
        assert "190 training and 10 held-out problems" in text and "duplicates dropped" in text
        assert "data.train_size=500 reduced: these are all there are" in text


def test_an_interrupted_generation_is_never_used(small, monkeypatch):
    settings = DataSettings(**small)

    def interrupted(self, problems):
        yield from enumerate(problems[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(builders.CispoProblems, "_generate_examples", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(settings)
    assert len(load(settings).train) == 40


def test_a_killed_generation_is_never_used(small):
    code = (
        "import time\n"
        "from cispo_jax.config import DataSettings; from cispo_jax.data import builders, load\n"
        "def slow(self, problems):\n"
        "    for item in enumerate(problems):\n"
        "        print('writing', flush=True)\n"
        "        import sys; print('writing', file=sys.stderr, flush=True)\n"
        "        time.sleep(0.2); yield item\n"
        "builders.CispoProblems._generate_examples = slow\n"
        f"load(DataSettings(**{small!r}))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=import_path())
    assert child.stderr.readline() == "writing\n"
    time.sleep(0.5)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stderr.close()
    assert len(load(DataSettings(**small)).train) == 40


def test_two_processes_may_generate_the_same_set(small, monkeypatch):
    """The other one finishes first: its set is read."""
    settings, real = DataSettings(**small), tasks.arithmetic

    def overtaken(*args, **kwargs):
        monkeypatch.setattr(tasks, "arithmetic", real)
        load(settings)
        return real(*args, **kwargs)

    monkeypatch.setattr(tasks, "arithmetic", overtaken)
    assert len(load(settings).train) == 40


def test_a_broken_or_unwritable_directory_is_refused(small, tmp_path):
    path = load(DataSettings(**small)).description.split("; in ")[1]
    os.remove(f"{path}/dataset_info.json")
    with pytest.raises(ConfigError, match=r"config\.data\.directory: .* is no finished data set"):
        load(DataSettings(**small))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"config\.data\.directory: the data set cannot be written"):
        load(DataSettings(**{**small, "directory": str(tmp_path / "file")}))


def test_bad_options_write_nothing(small, tmp_path):
    for source, options in (
        ("arithmetic", {"max": 3}),
        ("arithmetic", {"max_value": 3}),
        ("reasoning_gym:chain_sum", {"max": 3}),
    ):
        with pytest.raises(ConfigError, match="max"):
            load(DataSettings(**{**small, "source": source, "options": options}))
    assert not list((tmp_path / "sets").glob("cispo_*/*/*"))


# ---------------------------------------------------------------------------------------------------------------- files


def test_twenty_rows_are_split_and_said(tmp_path):
    settings = DataSettings(source=write_jsonl(tmp_path / "mine.jsonl", rows(20, level="easy")))
    problems = load(settings)
    assert (len(problems.train), len(problems.evaluation)) == (16, 4)
    assert "data.eval_size=256 reduced to a fifth of the file" in problems.description
    prompts = {example["prompt"] for example in [*problems.train, *problems.evaluation]}
    assert prompts == {row["prompt"] for row in rows(20)}
    assert problems.train[0]["level"] == "easy"  # other fields stay for the user's reward
    assert {type(example["answer"]) for example in problems.train} == {str}
    assert len({example["id"] for example in [*problems.train, *problems.evaluation]}) == 20
    assert load(settings) == problems
    golds = [example["answer"] for example in problems.evaluation]
    assert problems.scorer(golds, examples=problems.evaluation) == [1.0] * 4
    assert problems.verdict("none", problems.evaluation[0]) == "no number"


def test_the_split_depends_on_the_seed_and_not_on_the_order_of_the_rows(tmp_path):
    forward = load(DataSettings(source=write_jsonl(tmp_path / "a.jsonl", rows(50)), eval_size=5))
    backward = load(DataSettings(source=write_jsonl(tmp_path / "b.jsonl", rows(50)[::-1]), eval_size=5))
    other = load(DataSettings(source=str(tmp_path / "a.jsonl"), eval_size=5, seed=1))
    prompts = [[example["prompt"] for example in problems.evaluation] for problems in (forward, backward, other)]
    assert prompts[0] == prompts[1] != prompts[2]
    assert len(forward.train) == 45


def test_parquet_and_own_field_names(tmp_path):
    table = pyarrow.table(
        {"question": ["\u221a4 = ?", "2 + 2 = ?"], "gold": [2.0, 4.0], "blob": [b"x", "\u221a2".encode()]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    settings = DataSettings(source=str(tmp_path / "p.parquet"), prompt_field="question", answer_field="gold")
    problems = load(settings)
    examples = {example["prompt"]: example for example in [*problems.train, *problems.evaluation]}
    assert examples["\u221a4 = ?"]["answer"] == "2.0" and examples["2 + 2 = ?"]["blob"] == "\u221a2"
    assert exact_match(["2"], examples=[examples["\u221a4 = ?"]]) == [1.0]


def test_bytes_become_text(tmp_path):
    """Prompt b"What is 2+2?", gold b"033": text after the loader, and 33 is right."""
    table = pyarrow.table({"prompt": [b"What is 2+2?", "\u221a2?".encode()], "answer": [b"033", b"1"]})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    problems = load(DataSettings(source=str(tmp_path / "p.parquet")))
    examples = {example["prompt"]: example for example in [*problems.train, *problems.evaluation]}
    assert set(examples) == {"What is 2+2?", "\u221a2?"}
    assert exact_match(["33"], examples=[examples["What is 2+2?"]]) == [1.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (2.5, "2.5"), (1e20, "100000000000000000000"), (True, "True"), ("033", "033"), (-0.001, "-0.001")],
)
def test_values_become_text(tmp_path, value, text):
    table = [{"prompt": "a", "answer": value}, {"prompt": "b", "answer": value}]
    assert load(DataSettings(source=write_jsonl(tmp_path / "v.jsonl", table))).train[0]["answer"] == text


def test_duplicates_are_dropped_and_counted(tmp_path):
    """3 problems, each listed twice: 3 problems."""
    table = rows(3) + [{"prompt": row["prompt"], "answer": f"0{row['answer']}"} for row in rows(3)]
    problems = load(DataSettings(source=write_jsonl(tmp_path / "d.jsonl", table), eval_size=1))
    assert len(problems.train) + len(problems.evaluation) == 3
    assert "3 duplicates dropped" in problems.description


def test_evaluation_file(tmp_path):
    source = write_jsonl(tmp_path / "train.jsonl", rows(10))
    evaluation = write_jsonl(tmp_path / "eval.jsonl", rows(14)[8:] * 2)
    problems = load(DataSettings(source=source, eval_source=evaluation))
    assert (len(problems.train), len(problems.evaluation)) == (8, 6)
    assert "6 duplicates dropped (of 12 rows)" in problems.description
    assert "2 training problems dropped because they are evaluated" in problems.description
    with pytest.raises(ConfigError, match=r"config\.data\.eval_source=.* holds every prompt of config\.data\.source"):
        load(DataSettings(source=source, eval_source=source))
    assert len(load(DataSettings(source=source, eval_source=evaluation, eval_size=2)).evaluation) == 2


def test_generated_training_with_an_evaluation_file(small, tmp_path):
    evaluation = write_jsonl(tmp_path / "eval.jsonl", rows(6))
    problems = load(DataSettings(**{**small, "eval_source": evaluation}))
    assert (len(problems.train), len(problems.evaluation)) == (40, 6)
    with pytest.raises(ConfigError, match=r"config\.data\.eval_source=.*cannot be scored by reasoning_gym:chain_sum"):
        load(DataSettings(**{**small, "options": {}, "source": "reasoning_gym:chain_sum", "eval_source": evaluation}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answr": 2}',
         r"line 2 has no field 'answer' \(config\.data\.answer_field\)\. Did you mean .answr.\? It has: prompt, answr"),
        ('{"promt": "a", "answer": 1}', r"line 1 has no field 'prompt' \(config\.data\.prompt_field\)\. .*promt"),
        ('{"prompt": "a", "answer": 1}\n\n{"prompt": "b",', r"line 3 is not JSON .*: '\{\"prompt\": \"b\",'"),
        ('["a", 1]', r"line 1 is a JSON list, not an object"),
        ('{"prompt": "a", "answer": 1}\n{"prompt": "a", "answer": 2}',
         r"line 1 and line 2 hold the same prompt with different answers, '1' and '2'"),
        ('{"id": 7, "prompt": "a", "answer": 1}\n{"id": 7, "prompt": "b", "answer": 1}',
         r"line 1 and line 2 hold the same id '7' with different prompts"),
        ('{"prompt": "a", "answer": null}', r"line 1, field 'answer' is None; it must hold text or a number"),
        ('{"prompt": " ", "answer": 1}', r"line 1, field 'prompt' is empty"),
        ('{"prompt": [{"role": "user"}], "answer": 1}', r"line 1, field 'prompt' is \[\{'role'"),
        ('{"prompt": "a", "answer": NaN}', r"field 'answer' is nan"),
        ("\n", r"the file holds no row"),
        ('{"prompt": "a", "answer": 1}', r"holds one problem; training and evaluation need one each"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_by_line_and_field(tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(DataSettings(source=str(tmp_path / "bad.jsonl")))
    assert str(caught.value).startswith("config.data.source=") and "\n" not in str(caught.value)


def test_files_that_are_not_there_or_not_what_they_seem(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", rows(3))
    (tmp_path / "fake.parquet").write_text("not parquet")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9", "answer": 1}')
    for name, message in {
        "trian.jsonl": r"there is no such file\. Did you mean .train\.jsonl..* holds: ",
        "nowhere/x.jsonl": r"there is no such file\. .*nowhere holds no such file",
        "train.csv": r"the name must end in \.jsonl or \.parquet",
        "fake.parquet": r"cannot be read as Parquet",
        "latin.jsonl": r"line 1 is not UTF-8",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load(DataSettings(source=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "arithmetics"}, r"config\.data\.source='arithmetics' is none of: .*Did you mean .arithmetic."),
        ({"source": ""}, r"config\.data\.source='' is none of"),
        ({"train_size": 0}, r"config\.data\.train_size=0 must be at least 1"),
        ({"eval_size": 0}, r"config\.data\.eval_size=0 must be at least 1"),
        ({"source": "x.jsonl", "options": {"a": 1}}, r"config\.data\.options=\{'a': 1\} is for generated problems"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load(DataSettings(**settings))


def test_missing_tfds_says_how_to_install(monkeypatch, small):
    monkeypatch.setitem(sys.modules, "cispo_jax.data.builders", None)
    monkeypatch.delattr(cispo_jax.data, "builders")
    with pytest.raises(ConfigError, match=r"pip install 'cispo-jax\[train\]'"):
        load(DataSettings(**small))
    assert loading.GYM == "reasoning_gym:"


def import_path():
    return {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(cispo_jax.__file__))}


ROWS = [{"prompt": f"{n}?", "answer": str(n), "extra": n} for n in range(20)]


def test_examples_from_python_are_split_and_left_alone():
    made = loading.from_examples(ROWS, DataSettings(eval_size=256))
    assert (len(made.train), len(made.evaluation)) == (16, 4) and made.description.startswith("dataset: 16 training")
    assert not {e["prompt"] for e in made.train} & {e["prompt"] for e in made.evaluation}
    assert {e["id"] for e in [*made.train, *made.evaluation]} == {str(n) for n in range(20)}
    assert all(e["extra"] == int(e["id"]) for e in made.train) and "id" not in ROWS[0]
    again = loading.from_examples(ROWS[::-1], DataSettings(eval_size=256))
    assert {e["prompt"] for e in again.evaluation} == {e["prompt"] for e in made.evaluation}
    assert made.scorer is exact_match
    assert (
        loading.from_examples(made, DataSettings()) is made
    )  # whoever splits and scores by themselves hands in `Problems`


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answr": "1"}], ["dataset[1]", "`answer`", "prompt, answr"]),
        ([{"prompt": "a", "answer": 1}] * 2, ["dataset[0]", "text `answer`"]),
        ([{}] * 2, ["dataset[0]", "`prompt`", "nothing"]),
        ([{"prompt": "a", "answer": "1"}], ["dataset", "one"]),
        ([], ["dataset", "empty"]),
        ([{"prompt": "a", "answer": "1"}] * 3, ["dataset"]),
    ],
)
def test_examples_that_cannot_be_are_refused(rows, words):
    """By place and field; one problem, none, or copies of one leave nothing to hold out or to train on."""
    with pytest.raises(ConfigError) as error:
        loading.from_examples(rows, DataSettings())
    assert all(word in str(error.value) for word in words), error.value
