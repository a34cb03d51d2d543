"""Lines of keys in TOML documents."""

from __future__ import annotations

import tomllib
from textwrap import dedent

from hypothesis import given
from hypothesis import strategies as st

from mlxd.config.toml_lines import key_lines


def lines(text: str) -> dict[tuple[str, ...], int]:
    """Lines of a document that is checked to be one."""
    document = dedent(text)
    tomllib.loads(document)
    return key_lines(document)


def test_headers_and_keys_have_their_lines() -> None:
    """Tables, keys, comments and blank lines are told apart."""
    assert lines("""\
        top = 1  # "a = 2"

        [a.b]   # [c]
        # x = 1
        y = 2
        """) == {("top",): 1, ("a",): 3, ("a", "b"): 3, ("a", "b", "y"): 5}


def test_dotted_and_quoted_keys_are_paths() -> None:
    """A dot inside quotes is part of a name, and blanks around dots are not."""
    found = lines("""\
        [models."qwen2.5"]
        batch . width = 1
        'x y' = 2
        "t\\u0041" = 3
        """)

    assert found["models", "qwen2.5", "batch", "width"] == 2
    assert found["models", "qwen2.5", "x y"] == 3
    assert found["models", "qwen2.5", "tA"] == 4


def test_what_is_inside_a_value_is_no_key() -> None:
    """Text over several lines, arrays and inline tables count as their key's own line."""
    found = lines('''\
        a = """
        b = 1
        \\"""  [c]
        """"
        d = [
          "]", # e = 1
          { f = 2 },
        ]
        g = \'\'\'
        [h]\'\'\'
        i = { j = "}" }
        k = 1
        ''')

    assert found == {("a",): 1, ("d",): 5, ("g",): 9, ("i",): 11, ("k",): 12}


def test_carriage_returns_and_a_missing_last_newline_change_nothing() -> None:
    """Files come from Windows editors too."""
    assert key_lines("a = 1\r\n[b]\r\nc = 2") == {("a",): 1, ("b",): 2, ("b", "c"): 3}


_values = st.sampled_from(['"x"', "1", "[\n 1,\n]", '"""\nq = 1\n"""', "'#'", "{ z = 1 }"])
_names = st.sampled_from(["a", "b-c", '"d.e"', "'f g'"])


@given(st.lists(st.tuples(_names, _values), unique_by=lambda pair: pair[0], max_size=4))
def test_every_key_stands_where_it_is_found(pairs: list[tuple[str, str]]) -> None:
    """Whatever values stand between them, each key's line begins with that key."""
    text = "".join(f"{name} = {value}\n" for name, value in pairs)
    found = key_lines(text)

    assert set(found) == {(name,) for name in tomllib.loads(text)}
    for (name,), line in found.items():
        spelled = text.splitlines()[line - 1].partition(" = ")[0]
        assert tomllib.loads(f"{spelled} = 1") == {name: 1}
