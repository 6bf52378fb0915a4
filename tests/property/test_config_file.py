"""Any text is a cluster file or a ``ClusterFileError``; any valid spec written as YAML reads back equal."""

from contextlib import suppress
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl.config.cluster import parse_cluster, show
from flodl.config.model import ClusterSpec
from flodl.config.problems import ClusterFileError
from flodl.config.relations import resolve_nothing

# ------------------------------------------------------------------------------------------------------- any text
TOKENS = [
    *("cluster", "controller", "workers", "host", "port", "env", "ssh", "ranks", "local_devices", "join", "<<", "no"),
    *(
        ": ",
        ":",
        "- ",
        "\n",
        "\n  ",
        "\n    ",
        "[",
        "]",
        "{",
        "}",
        ", ",
        "&a ",
        "*a",
        "!!str ",
        "'",
        '"',
        "|\n",
        "\t",
        "#",
    ),
    *(
        "01337",
        "13:37",
        "1e3",
        "~",
        "node-a",
        "10.0.0.1",
        "::1",
        "0",
        "1",
        "true",
        "%YAML 1.1\n",
        "---",
        "...",
        "\\x",
        "\ufeff",
    ),
]


def load(content: bytes) -> None:
    with suppress(ClusterFileError):
        parse_cluster(content, "f.yml", resolve_nothing)


@given(st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_bytes_load_or_are_refused(content: bytes) -> None:
    load(content)


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_loads_or_is_refused(text: str) -> None:
    load(text.encode("utf-8", "surrogatepass"))


@given(st.lists(st.sampled_from(TOKENS), max_size=40))
@settings(max_examples=400, deadline=None)
def test_any_pieces_of_a_cluster_file_load_or_are_refused(tokens: list[str]) -> None:
    load("".join(tokens).encode())


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(TOKENS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TOKENS[:12]), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES, st.sampled_from(["cluster", "controller", "workers", "worker", "join", "ssh"]))
@settings(max_examples=300, deadline=None)
def test_any_value_in_any_place_loads_or_is_refused(value: Any, place: str) -> None:
    controller: Any = {"host": "h", "join": value} if place == "join" else {"host": "h"}
    worker: Any = {"host": "a", "ssh": value} if place == "ssh" else {"host": "a"}
    cluster: Any = {
        "controller": value if place == "controller" else controller,
        "workers": value if place == "workers" else [value if place == "worker" else worker],
    }
    document = {"cluster": value if place == "cluster" else cluster}
    load(yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass"))


# ------------------------------------------------------------------------------------------------------ round trip
class Quoted(yaml.SafeDumper):
    """Text in double quotes, so that no word can be taken for anything else."""


Quoted.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))
Quoted.add_representer(tuple, lambda dumper, items: dumper.represent_list(items))

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z]", fullmatch=True)
HOSTS = NAMES | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str)
PATHS = st.text(st.characters(categories=("L", "N", "P")), max_size=12).map(lambda text: f"/{text}")
WORDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.=:^,]{0,9}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
ENVS = st.dictionaries(st.from_regex(r"X[A-Za-z0-9_]{0,9}", fullmatch=True), TEXTS, max_size=3)
SECONDS = st.integers(1, 1000) | st.floats(0.001, 1000).map(lambda value: round(value, 3))
PORTS = st.integers(1, 65535)
GPU_IDS = st.from_regex(r"(GPU|MIG)-[0-9a-f]{8}", fullmatch=True)
DEVICES = (
    st.just("all")
    | st.lists(st.just("cpu"), min_size=1, max_size=3).map(tuple)
    | st.lists(st.integers(0, 9) | st.just("cpu"), min_size=1, max_size=3, unique=True).map(tuple)
    | st.lists(GPU_IDS, min_size=1, max_size=3, unique=True).map(tuple)
)
SSH = st.fixed_dictionaries(
    {},
    optional={
        "port": PORTS,
        "user": WORDS,
        "identity_file": PATHS,
        "proxy_jump": WORDS,
        "options": st.lists(st.builds("Key{}={}".format, st.integers(0, 9), WORDS), max_size=2).map(tuple),
    },
)


@st.composite
def worker_lists(draw: st.DrawFn) -> tuple[dict[str, Any], ...]:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    workers = [
        draw(
            st.fixed_dictionaries(
                {"host": st.just(name), "local_devices": DEVICES},
                optional={
                    "nccl_socket_ifname": WORDS,
                    "path": PATHS,
                    "python": PATHS,
                    "data_path": PATHS,
                    "env": ENVS,
                    "ssh": SSH,
                    "tunnel": st.booleans(),
                },
            )
        )
        for name in names
    ]
    if draw(st.booleans()):
        counts = [1 if one["local_devices"] == "all" else len(one["local_devices"]) for one in workers]
        order = draw(st.permutations(range(sum(counts))))
        for worker, count in zip(workers, counts, strict=True):
            worker["ranks"], order = tuple(order[:count]), order[count:]
    return tuple(workers)


@st.composite
def specs(draw: st.DrawFn) -> ClusterSpec:
    first, second = sorted(draw(st.tuples(SECONDS, SECONDS)))
    workers, is_elastic = draw(worker_lists()), draw(st.booleans())
    few, many = sorted(draw(st.tuples(st.integers(1, 99), st.integers(1, 99))))
    if not is_elastic:
        few = min(few, sum(len(one["local_devices"]) for one in workers))  # nobody else may come
    beats = sorted(draw(st.lists(SECONDS, min_size=3, max_size=3, unique_by=float)))
    join = {"min_rank_start": few, "target_ranks": many, "join_timeout": first, "max_join_timeout": second}
    controller = {
        "host": draw(HOSTS.filter(lambda host: host not in ("0.0.0.0", "::"))),
        "port": draw(PORTS),
        "path": draw(PATHS),
        "join": {**join, "start": draw(st.sampled_from(["auto", "manual", "hybrid"])), "elastic": is_elastic},
    }
    return ClusterSpec.model_validate(
        {
            "controller": controller,
            "workers": workers,
            "env": draw(ENVS),
            "sync": {"mode": draw(st.sampled_from(["off", "rsync", "sftp"])), "exclude": ("*.pt",)},
            "liveness": dict(zip(("heartbeat_s", "suspect_s", "dead_s"), beats, strict=True)),
            "on_disconnect_s": draw(SECONDS),
            "security": {"tls": draw(st.sampled_from(["auto", "on", "off"]))},
        }
    )


@given(specs())
@settings(max_examples=150, deadline=None)
def test_spec_written_as_yaml_reads_back_equal(spec: ClusterSpec) -> None:
    text = yaml.dump({"cluster": spec.model_dump(exclude_none=True)}, Dumper=Quoted, allow_unicode=True)

    again = parse_cluster(text.encode(), "f.yml", resolve_nothing)

    assert again == spec
    assert all(row.origin.startswith("f.yml:") for row in show(again) if row.value not in (None, [], {}))


@given(specs())
@settings(max_examples=50, deadline=None)
def test_spec_goes_through_json_unchanged(spec: ClusterSpec) -> None:
    assert ClusterSpec.model_validate_json(spec.model_dump_json()) == spec
