"""YAML with places: what is read, what is a trap, what is refused."""

import pytest

from flodl.config.problems import ClusterFileError, KeyPath, Problem
from flodl.config.yaml_source import MAX_FILE_BYTES, Document, Trap, plain_value, read_yaml


def read(text: str, words: tuple[str, ...] = ()) -> Document:
    def is_word(path: KeyPath, word: str) -> bool:
        return word in words

    return read_yaml(text.encode(), "x.yml", is_word)


def refusal(content: bytes | str) -> Problem:
    raw = content.encode() if isinstance(content, str) else content
    with pytest.raises(ClusterFileError) as caught:
        read_yaml(raw, "x.yml", lambda path, word: False)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("0", 0),
        ("-7", -7),
        ("1337", 1337),
        ("10.0", 10.0),
        ("node-a", "node-a"),
        ("192.168.122.1", "192.168.122.1"),
        ("::1", "::1"),
        ("GPU-12", "GPU-12"),
        ("~/.ssh/key", "~/.ssh/key"),
    ],
)
def test_plain_text_is_what_it_looks_like(text: str, value: object) -> None:
    read_value = plain_value(text)

    assert read_value == value
    assert type(read_value) is type(value)


@pytest.mark.parametrize(
    ("text", "reads_as", "decimal"),
    [
        ("no", "the boolean false", ""),
        ("Off", "the boolean false", ""),
        ("on", "the boolean true", ""),
        ("Y", "the boolean true", ""),
        ("~", "null, that is no value", ""),
        ("", "null, that is no value", ""),
        ("NULL", "null, that is no value", ""),
        ("01337", "the octal number 735", "1337"),
        ("-010", "the octal number -8", "-10"),
        ("0o17", "the octal number 15", "17"),
        ("00", "the octal number 0", "0"),
        ("089", "a number in some readers and text in others", "89"),
        ("0x10", "the number 16", "16"),
        ("0b101", "the number 5", "5"),
        ("1_000", "the number 1000", "1000"),
        ("13:37", "a number in base 60", ""),
        ("1:2:3:4:5:6:7:8", "a number in base 60", ""),
        ("1e3", "a number in scientific or short notation", "1000"),
        ("1.5e0", "a number in scientific or short notation", "1.5"),
        (".5", "a number in scientific or short notation", "0.5"),
        ("1e-9", "a number in scientific or short notation", ""),
        ("1e99", "a number in scientific or short notation", ""),
        ("1e999", "a number in scientific or short notation", ""),
        (".inf", "infinity or not-a-number", ""),
        ("2024-01-01", "a date", ""),
        ("2024-01-01T10:00:00Z", "a date", ""),
        ("=", "a sign of YAML's own", ""),
        ("12345678901234567890", "a number of more than 18 characters", ""),
    ],
)
def test_trap_says_what_readers_take_it_for(text: str, reads_as: str, decimal: str) -> None:
    assert plain_value(text) == Trap(text, reads_as, decimal)


def test_quoted_text_is_text_and_lists_become_tuples() -> None:
    assert read("a: ['no', \"1\"]\nb: |-\n  10\n").data == {"a": ("no", "1"), "b": "10"}


def test_word_of_the_schema_is_no_trap() -> None:
    assert read("a: off\nb: on", words=("off",)).data == {"a": "off", "b": Trap("on", "the boolean true")}


def test_places_of_keys_and_values_count_from_one() -> None:
    document = read("a:\n  - b: '7'\n")

    assert (document.keys[("a", 0, "b")].line, document.keys[("a", 0, "b")].column) == (2, 5)
    place = document.values[("a", 0, "b")]
    assert (place.line, place.column, place.raw) == (2, 8, "'7'")


def test_byte_order_mark_and_crlf_are_fine() -> None:
    document = read("\ufeffa: 1\r\nb: 2\r\n")

    assert document.data == {"a": 1, "b": 2}
    assert (document.values[("b",)].line, document.values[("b",)].column) == (2, 4)


def test_repeated_key_is_a_problem_that_names_the_first_one() -> None:
    (problem,) = read("a: 1\nb: 2\na: 3\n").problems

    assert (problem.line, problem.column, problem.key) == (3, 1, "a")
    assert "line 1" in problem.expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("on: 1", "boolean true"),
        ("1: 1", "number or a boolean"),
        ("[a]: 1", "a key that is text"),
        ("? {a: b}\n: 1", "text"),
    ],
)
def test_key_that_is_no_text_is_a_problem(text: str, words: str) -> None:
    (problem,) = read(text).problems

    assert words in problem.expected


def test_quoted_key_may_be_any_text() -> None:
    assert read("'on': 1\n'<<': 2").data == {"on": 1, "<<": 2}


def test_anchors_and_merge_keys_work_and_own_keys_win() -> None:
    text = "base: &b {p: 1, q: 2}\none: {<<: *b, q: 3}\ntwo: {<<: [*b, {r: 4}], p: 5}\nsame: *b\n"

    document = read(text)

    assert document.problems == []
    assert document.data == {
        "base": {"p": 1, "q": 2},
        "one": {"q": 3, "p": 1},
        "two": {"p": 5, "q": 2, "r": 4},
        "same": {"p": 1, "q": 2},
    }


def test_merge_of_what_is_no_mapping_is_a_problem() -> None:
    (problem,) = read("a: {<<: 7}").problems

    assert problem.key == 'a["<<"]'
    assert "mapping" in problem.expected


def test_alias_bomb_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]

    assert "aliases expanded" in refusal("\n".join(lines)).expected


def test_merge_bomb_is_refused() -> None:
    lines = ["a0: &a0 {}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 9)]

    assert "aliases expanded" in refusal("\n".join(lines)).expected


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {<<: *a}", "a: &a {b: *a}"])
def test_alias_of_itself_is_refused(text: str) -> None:
    assert "levels" in refusal(text).expected


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 1000, "- " * 1000])
def test_deep_nesting_is_refused(text: str) -> None:
    assert "levels" in refusal(text).expected


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.system [x]", "a: !!str 5", "!x a: 1", "a: ! 5"])
def test_tags_are_refused(text: str) -> None:
    problem = refusal(text)

    assert "no tag" in problem.expected
    assert problem.line == 1


@pytest.mark.parametrize("text", ["a:\n\tb: 1\n", "a:\n  b: 1\n\tc: 2\n"])
def test_tab_is_refused_where_it_stands(text: str) -> None:
    problem = refusal(text)

    assert "tab" in problem.expected
    assert problem.position == f"x.yml:{text.count(chr(10))}:1"


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "\ufeff"])
def test_empty_file_is_refused(text: str) -> None:
    assert refusal(text).read == "an empty file"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2", "valid YAML"),
        ("a: 1\n---\nb: 2", "one document"),
        ("a: 'x", "valid YAML"),
        ('a: "\\UFFFFFFFF"', "out of range"),
        ('a: "\\U00110000"', "out of range"),
        ("a: *nobody", "valid YAML"),
        ("a: \x07", "control character"),
        ("a: 1\nb: \x00", "control character"),
        ("%YAML 9.9\n---\na: 1", "valid YAML"),
    ],
)
def test_text_that_is_no_yaml_is_refused(text: str, expected: str) -> None:
    assert expected in refusal(text).expected


def test_unquoted_address_in_brackets_gets_its_remedy() -> None:
    assert "quotes" in refusal("a: {host: [::1]}").fix


@pytest.mark.parametrize("content", ["a: é".encode("latin-1"), "a: 1".encode("utf-16"), "\ufeffa: ".encode() + b"\xff"])
def test_other_encodings_are_refused(content: bytes) -> None:
    problem = refusal(content)

    assert problem.expected == "UTF-8 text"
    assert problem.line == 1


def test_wrong_byte_is_placed() -> None:
    assert refusal("a: 1\nbé: ".encode() + b"\xff").position == "x.yml:2:5"


def test_file_beyond_the_limit_is_refused() -> None:
    assert "at most 256 KiB" in refusal(b"#" * (MAX_FILE_BYTES + 1)).expected
