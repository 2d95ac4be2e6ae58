"""Prompt files give rows; a malformed one is refused by file and line."""

import pytest

from flowgrpo.core.errors import ConfigError
from flowgrpo.data.prompts import load_prompts


def test_prompt_files_of_every_format_give_rows_with_their_source(tmp_path):
    (tmp_path / "a.txt").write_text("a cat\n\na dog\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a cat", "target": "CAT"}\n')
    (tmp_path / "c.csv").write_text("prompt,target\na cat,CAT\n")
    assert [row.prompt for row in load_prompts(tmp_path / "a.txt")] == ["a cat", "a dog"]
    assert load_prompts(tmp_path / "a.txt")[1].source.endswith("a.txt line 3")
    for name in ("b.jsonl", "c.csv"):
        (row,) = load_prompts(tmp_path / name)
        assert row.columns == {"target": "CAT"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "\n", "holds no prompts"),
        ("a.jsonl", '{"prompt": "x"}\n{bad', "line 2 is not JSON"),
        ("a.jsonl", '{"text": "x"}', "line 1 has no prompt"),
        ("a.csv", "prompt\nx\n ", "line 3 has no prompt"),
        ("a.csv", 'prompt\n"unclosed\na\n', "is not CSV"),
        ("a.csv", "prompt,prompt\na,b\n", "line 1 has a column twice"),
        ("a.csv", "prompt\na,b\n", "has more cells than the header"),
        ("a.json", "[]", "must end in"),
    ],
)
def test_a_bad_prompt_file_names_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_prompts(tmp_path / name)


@pytest.mark.parametrize("data", [{"train": ["a cat"]}, {"prompt": ["a cat"]}])
def test_a_mapping_of_splits_or_columns_is_refused(data):
    with pytest.raises(ConfigError, match="dataset is a dict, but must be rows"):
        load_prompts(data)


def test_a_missing_prompt_file_is_refused():
    with pytest.raises(ConfigError, match="there is no such file"):
        load_prompts("nowhere.txt")
