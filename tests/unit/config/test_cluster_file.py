"""Loading cluster files: what is refused, where, and with which words (B40)."""

from pathlib import Path

import pytest

from flodl.config.cluster import load_cluster, parse_cluster
from flodl.config.problems import MAX_SHOWN_PROBLEMS, ClusterFileError, Problem
from flodl.config.relations import resolve_nothing

GOOD = "cluster:\n  controller: {host: 10.0.0.1}\n  workers:\n    - host: node-a\n"


def problems_of(text: str) -> tuple[Problem, ...]:
    with pytest.raises(ClusterFileError) as caught:
        parse_cluster(text.encode(), "f.yml", resolve_nothing)
    return caught.value.problems


def only_problem(text: str) -> Problem:
    (problem,) = problems_of(text)
    return problem


def with_controller(keys: str) -> str:
    return f"cluster:\n  controller: {{host: 10.0.0.1, {keys}}}\n  workers: [{{host: node-a}}]\n"


def with_host(host: str) -> str:
    return f"cluster:\n  controller: {{host: 10.0.0.1}}\n  workers:\n    - host: {host}\n"


def with_worker(keys: str) -> str:
    return f"cluster:\n  controller: {{host: 10.0.0.1}}\n  workers:\n    - {{host: node-a, {keys}}}\n"


CLOSED = """
cluster:
  controller: {host: b, join: {target_ranks: 2, elastic: false}}
  workers: [{host: a, local_devices: [cpu]}]
"""


def with_cluster(line: str) -> str:
    return f"{GOOD}  {line}\n"


@pytest.mark.parametrize(
    ("host", "fix"),
    [
        ("no", 'YAML readers take `no` for the boolean false; put it in quotes: "no"'),
        ("on", 'YAML readers take `on` for the boolean true; put it in quotes: "on"'),
        ("10.0", ""),
        ("1e3", 'put it in quotes: "1e3"'),
        ("~", "YAML readers take `~` for null, that is no value"),
        ("", "write a value, or leave the key out"),
        ("2024-01-01", "for a date"),
        ("13:37", "base 60"),
        ("true", ""),
        ('"10.0"', ""),
        ("node-a:22", ""),
        ("[fe80::1]", 'put an address in brackets into quotes: "[::1]"'),
        ("{a: b}", ""),
    ],
)
def test_host_that_yaml_misreads_is_refused_in_place(host: str, fix: str) -> None:
    problem = only_problem(with_host(host))

    assert problem.key == "cluster.workers[0].host"
    assert problem.read == host
    assert problem.position.startswith("f.yml:4:" if host else "f.yml:")
    assert problem.expected.startswith("a host name")
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("port", "expected", "fix"),
    [
        ("01337", "a whole number", "write 1337"),
        ("13:37", "a whole number", "YAML readers take `13:37` for a number in base 60"),
        ('"1337"', "a whole number", "drop the quotes: 1337"),
        ("0x539", "a whole number", "write 1337"),
        ("1e3", "a whole number", "write 1000"),
        ("1337.0", "a whole number", "write 1337"),
        ("1337.5", "a whole number", ""),
        ("0", "a port from 1 to 65535", ""),
        ("70000", "a port from 1 to 65535", ""),
        ("-1", "a port from 1 to 65535", ""),
        ("true", "a whole number", ""),
        ("x", "a whole number", ""),
        ("[1]", "a whole number", ""),
        ("99999999999999999999", "a whole number", "more than 18"),
    ],
)
def test_port_that_is_no_plain_number_is_refused(port: str, expected: str, fix: str) -> None:
    problem = only_problem(with_controller(f"port: {port}"))

    assert (problem.key, problem.read) == ("cluster.controller.port", port)
    assert (problem.line, problem.column) == (2, 38)
    assert problem.expected == expected
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("text", "key", "expected", "fix"),
    [
        (with_controller("hots: x"), "cluster.controller.hots", "one of the keys `host`", "did you mean `host`?"),
        (with_controller("zzz: x"), "cluster.controller.zzz", "one of the keys `host`", ""),
        (with_controller("join: {token: x}"), "cluster.controller.join.token", "one of the keys", "token file"),
        (with_controller("join: {elastic: yes}"), "cluster.controller.join.elastic", "`true` or `false`", "write true"),
        (with_controller('join: {elastic: "No"}'), "cluster.controller.join.elastic", "`true` or `false`", ""),
        (with_controller('join: {elastic: "True"}'), "cluster.controller.join.elastic", "`true` or `false`", "true"),
        (with_controller("join: {elastic: 0x1}"), "cluster.controller.join.elastic", "`true` or", "the number 1"),
        (with_controller("join: {start: manul}"), "cluster.controller.join.start", "`auto`, `manual`", "`manual`?"),
        (with_controller("join: {start: no}"), "cluster.controller.join.start", "`auto`, `manual`", "boolean false"),
        (with_controller("join: {start: 7}"), "cluster.controller.join.start", "`auto`, `manual`", ""),
        (with_controller("join: {min_rank_start: 0}"), "cluster.controller.join.min_rank_start", "at least 1", ""),
        (with_controller("join: {join_timeout: 0}"), "cluster.controller.join.join_timeout", "more than 0", ""),
        (with_controller('join: {join_timeout: "5.5"}'), "cluster.controller.join.join_timeout", "a number", "5.5"),
        (with_controller("join: {join_timeout: 9999999999}"), "cluster.controller.join.join_timeout", "at most", ""),
        (with_controller("path: ./x"), "cluster.controller.path", "an absolute path", ""),
        (with_controller("path: 10"), "cluster.controller.path", "text", "quotes"),
        (with_controller("path: [a]"), "cluster.controller.path", "text", "quotes"),
        (with_controller("path: {a: b}"), "cluster.controller.path", "text", ""),
        (with_controller("path: off"), "cluster.controller.path", "text", 'put it in quotes: "off"'),
        (with_controller("path: ''"), "cluster.controller.path", "printable text", ""),
        (with_controller('path: "/\\ud800"'), "cluster.controller.path", "text", ""),
        (with_controller("advertise: 0.0.0.0"), "cluster.controller.advertise", "can be dialled", ""),
        (with_worker("local_devices: []"), "cluster.workers[0].local_devices", "`all`, or a list", ""),
        (with_worker("local_devices: 0"), "cluster.workers[0].local_devices", "`all`, or a list", ""),
        (with_worker("local_devices: [0, 0]"), "cluster.workers[0].local_devices[1]", "each GPU once", ""),
        (with_worker("local_devices: [cuda]"), "cluster.workers[0].local_devices[0]", "a GPU index", ""),
        (with_worker("local_devices: [true]"), "cluster.workers[0].local_devices[0]", "a GPU index", ""),
        (with_worker("local_devices: [-1]"), "cluster.workers[0].local_devices[0]", "a GPU index", ""),
        (with_worker('local_devices: ["0"]'), "cluster.workers[0].local_devices[0]", "a GPU index", "drop the quotes"),
        (with_worker("local_devices: [0, GPU-1]"), "cluster.workers[0].local_devices", "a mix", ""),
        (with_worker("ranks: []"), "cluster.workers[0].ranks", "at least one entry", ""),
        (with_worker("ranks: 0"), "cluster.workers[0].ranks", "a list", "write it as a list"),
        (with_worker("ranks: [no]"), "cluster.workers[0].ranks[0]", "a whole number", "boolean false"),
        (with_worker("ranks: [true]"), "cluster.workers[0].ranks[0]", "a whole number", ""),
        (with_worker("ranks: [1]"), "cluster.workers[0].ranks[0]", "nobody has 0", ""),
        (with_worker("local_devices: [0], ranks: [0, 1]"), "cluster.workers[0].ranks", "which has 1", ""),
        (with_worker("python: bin/python"), "cluster.workers[0].python", "an absolute path, or", ""),
        (with_worker("nccl_socket_ifname: 'a b'"), "cluster.workers[0].nccl_socket_ifname", "one word", ""),
        (with_worker("env: {A: 1}"), "cluster.workers[0].env.A", "text", "quotes"),
        (with_worker("env: {A: no}"), "cluster.workers[0].env.A", "text", 'put it in quotes: "no"'),
        (with_worker("env: {A: [x]}"), "cluster.workers[0].env.A", "text", "quotes"),
        (with_worker("env: {A: {b: c}}"), "cluster.workers[0].env.A", "text", ""),
        (with_worker('env: {A: "x\\0"}'), "cluster.workers[0].env.A", "an environment can hold", ""),
        (with_worker('env: {A: "\\udfff"}'), "cluster.workers[0].env.A", "an environment can hold", ""),
        (with_worker("env: {a b: x}"), 'cluster.workers[0].env["a b"]', "a variable's name", ""),
        (with_worker("env: {RANK: x}"), "cluster.workers[0].env.RANK", "another variable", ""),
        (
            with_worker("env: {CUDA_VISIBLE_DEVICES: x}"),
            "cluster.workers[0].env.CUDA_VISIBLE_DEVICES",
            "`local_dev",
            "",
        ),
        (with_worker("env: [x]"), "cluster.workers[0].env", "a mapping", ""),
        (with_worker("env: no"), "cluster.workers[0].env", "a mapping", "boolean false"),
        (with_worker("ssh: node-b"), "cluster.workers[0].ssh", "a mapping with the keys `target`", ""),
        (with_worker("ssh: {port: 0}"), "cluster.workers[0].ssh.port", "a port from 1 to 65535", ""),
        (with_worker("ssh: {target: me@b}"), "cluster.workers[0].ssh.target", "an alias", "`ssh.user`"),
        (with_worker("ssh: {target: -oX}"), "cluster.workers[0].ssh.target", "one word", ""),
        (with_worker("ssh: {options: [x]}"), "cluster.workers[0].ssh.options[0]", "Key=value", "Strict"),
        (with_worker("ssh: {}, daemon: managed"), "cluster.workers[0].ssh", "dials in by itself", ""),
        (with_worker("tunnel: true, daemon: managed"), "cluster.workers[0].tunnel", "no ssh session", ""),
        (with_cluster("sync: {mode: rsyn}"), "cluster.sync.mode", "`off`, `rsync`, `sftp`", "`rsync`?"),
        (with_cluster("liveness: {suspect_s: 30}"), "cluster.liveness.suspect_s", "less than dead_s", ""),
        (with_cluster("liveness: {heartbeat_s: 10}"), "cluster.liveness.heartbeat_s", "less than suspect_s", ""),
        (with_cluster("on_disconnect_s: .inf"), "cluster.on_disconnect_s", "a number", "infinity"),
        (with_cluster("env: {<<: 7}"), 'cluster.env["<<"]', "a mapping to merge", ""),
        ("cluster:\n  workers: [{host: a}]", "cluster", "the key `controller`", ""),
        ("cluster:\n  controller: {host: b}", "cluster", "the key `workers`", ""),
        ("cluster:\n  controller: {host: b}\n  workers: []", "cluster.workers", "at least one worker", ""),
        (
            "cluster:\n  controller: {host: b, join: {min_rank_start: 1, elastic: false}}\n  workers: []",
            "cluster.workers",
            "and `elastic`",
            "",
        ),
        (
            CLOSED,
            "cluster.controller.join.target_ranks",
            "at most 1, as many ranks as the workers have",
            "",
        ),
        ("cluster:\n  controller: {host: b}\n  workers: a", "cluster.workers", "a list", ""),
        ("cluster:\n  controller: {host: b}\n  workers: [a]", "cluster.workers[0]", "a mapping with the keys", ""),
        ("clusters: {}\ncluster: 7", "clusters", "one of the keys `cluster`", "did you mean `cluster`?"),
        ("[1]", "", "a mapping with the keys `cluster`", ""),
        ("~", "", "a mapping with the keys `cluster`", "null"),
    ],
)
def test_wrong_value_is_refused_by_key_with_what_to_write(text: str, key: str, expected: str, fix: str) -> None:
    problem = next(one for one in problems_of(text) if one.key == key)

    assert problem.line is not None
    assert expected in problem.expected
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ("min_rank_start: 3, target_ranks: 2", "min_rank_start"),
        ("join_timeout: 700", "join_timeout"),
        ("join_timeout: 200, max_join_timeout: 100", "join_timeout"),
        ("max_join_timeout: 100", "max_join_timeout"),
    ],
)
def test_join_window_that_cannot_work_is_refused(keys: str, key: str) -> None:
    assert only_problem(with_controller(f"join: {{{keys}}}")).key == f"cluster.controller.join.{key}"


def test_default_that_a_key_collides_with_is_named_as_one() -> None:
    problem = only_problem(with_controller("join: {max_join_timeout: 60}"))
    assert (problem.read, problem.expected) == ("60", "at least join_timeout, which is 300 seconds by default")
    assert problem.fix == "add `join_timeout: 60`, or less"
    problem = only_problem(with_controller("join: {join_timeout: 700}"))
    assert problem.expected == "at most max_join_timeout, which is 600 seconds by default"
    assert problem.fix == "lower `join_timeout`, or set `max_join_timeout` to 700 seconds or more"


def test_bind_to_every_address_needs_something_to_dial() -> None:
    text = "cluster:\n  controller: {host: '::'%s}\n  workers: [{host: a}]"

    assert "advertise" in only_problem(text % "").fix
    assert parse_cluster((text % ", advertise: head.lab").encode(), "f", resolve_nothing).controller.host == "::"


def test_repeated_key_is_refused() -> None:
    problem = only_problem("cluster:\n  controller: {host: b, host: c}\n  workers: [{host: a}]")

    assert (problem.key, problem.line, problem.column) == ("cluster.controller.host", 2, 25)


@pytest.mark.parametrize("other", ["NODE-A", "10.0.0.7", "node-a."])
def test_same_machine_twice_is_refused(other: str) -> None:
    def resolve(name: str) -> frozenset[str]:
        return frozenset({"10.0.0.7"}) if name.casefold().startswith("node-a") else frozenset()

    with pytest.raises(ClusterFileError) as caught:
        parse_cluster(f"{GOOD}    - host: {other}\n".encode(), "f.yml", resolve)

    (problem,) = caught.value.problems
    assert (problem.key, problem.read, problem.line) == ("cluster.workers[1].host", other, 5)
    assert "workers[0].host `node-a`" in problem.expected


def test_ssh_target_and_port_decide_what_is_dialled() -> None:
    text = f"{GOOD}    - host: b\n      ssh: {{target: node-a, port: %s, proxy_jump: %s}}\n"

    assert len(parse_cluster((text % (2222, "'j'")).encode(), "f", resolve_nothing).workers) == 2
    assert [one.key for one in problems_of(text % ("x", 7))] == [
        "cluster.workers[1].host",
        "cluster.workers[1].ssh.port",
        "cluster.workers[1].ssh.proxy_jump",
    ]


def test_all_errors_of_a_file_are_shown_together_in_its_order() -> None:
    text = (
        "cluster:\n"
        "  controller: {hots: x, host: no, port: 01337}\n"
        "  workers:\n"
        "    - {host: a, ranks: [0], path: x}\n"
        "    - {host: A, ranks: [0]}\n"
        "    - {}\n"
        "    - 7\n"
        "  syn: 1\n"
    )

    problems = problems_of(text)

    assert [one.key for one in problems] == [
        "cluster.controller.hots",
        "cluster.controller.host",
        "cluster.controller.port",
        "cluster.workers[0].path",
        "cluster.workers[1].host",
        "cluster.workers[2]",
        "cluster.workers[3]",
        "cluster.syn",
    ]
    assert [one.line for one in problems] == [2, 2, 2, 4, 5, 6, 7, 8]


def test_message_is_one_readable_block_per_problem() -> None:
    with pytest.raises(ClusterFileError) as caught:
        parse_cluster(with_controller('port: "1337"').encode(), "f.yml", resolve_nothing)

    assert str(caught.value) == (
        "f.yml:2:38: cluster.controller.port\n"
        '  read:     "1337"\n'
        "  expected: a whole number\n"
        "  fix:      drop the quotes: 1337"
    )
    assert caught.value.exit_code == 2


def test_file_of_another_kind_does_not_fill_the_screen() -> None:
    text = "\n".join(f"k{number}: 1" for number in range(MAX_SHOWN_PROBLEMS + 9))

    with pytest.raises(ClusterFileError, match="… and 10 more") as caught:
        parse_cluster(text.encode(), "f.yml", resolve_nothing)

    assert len(caught.value.problems) == MAX_SHOWN_PROBLEMS + 10


def test_long_value_is_cut_where_it_is_quoted() -> None:
    assert len(only_problem(with_host("x" * 300)).read) == 72


def test_missing_file_is_a_cluster_file_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match="No such file") as caught:
        load_cluster(tmp_path / "absent.yml")

    assert caught.value.problems[0].line is None


def test_folder_is_a_cluster_file_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match="directory"):
        load_cluster(tmp_path)


def test_file_is_loaded_with_bracketed_address_and_merged_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yml"
    path.write_text(
        "cluster:\n"
        '  controller: {host: "[::1]"}\n'
        "  workers:\n"
        "    - &gpu {host: a, path: /p, local_devices: [GPU-1, MIG-2]}\n"
        "    - {<<: *gpu, host: b}\n",
        encoding="utf-8-sig",
    )

    spec = load_cluster(path, resolve_nothing)

    assert spec.controller.host == "::1"
    assert [(worker.host, worker.path, worker.local_devices) for worker in spec.workers] == [
        ("a", "/p", ("GPU-1", "MIG-2")),
        ("b", "/p", ("GPU-1", "MIG-2")),
    ]


def test_roster_may_be_empty_where_ranks_come_by_themselves() -> None:
    text = "cluster:\n  controller: {host: b, join: {min_rank_start: 2}}\n  workers: []\n"
    assert parse_cluster(text.encode(), "f.yml", resolve_nothing).workers == ()


def test_closed_world_whose_devices_are_not_known_yet_may_ask_for_more() -> None:
    text = "cluster:\n  controller: {host: b, join: {min_rank_start: 9, elastic: false}}\n  workers: [{host: a}]\n"
    assert parse_cluster(text.encode(), "f.yml", resolve_nothing).controller.join.min_rank_start == 9


def test_key_that_is_missing_in_one_worker_is_told_at_that_worker() -> None:
    problem = only_problem(
        "cluster:\n"
        "  controller: {host: localhost}\n"
        "  workers:\n"
        "    - {host: node-a, ranks: [0], local_devices: [cpu]}\n"
        "    - {host: node-b, local_devices: [cpu]}\n"
    )
    assert (problem.key, problem.line, problem.read) == ("cluster.workers[1].ranks", 5, "no `ranks`")
