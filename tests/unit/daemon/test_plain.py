"""What ranks of a plain run are told: torchrun's variables, and the devices of their host."""

import inspect
import re

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from flodl.core.actions import SpawnRank
from flodl.messages import Device, PlainGroup, RankSpec
from flodl_daemon.plain import plain_environment
from flodl_daemon.routes import address_towards, interface_towards

CPU = RankSpec(3, 1, Device("cpu", 1))
GPU = RankSpec(3, 1, Device("cuda", 1, "GPU-b"))


def environment(spec: RankSpec = CPU, hosts: int = 1, **environ: str) -> dict[str, str]:
    gpus = ("GPU-a", "GPU-b") if spec.device.kind == "cuda" else ()
    group = PlainGroup("127.0.0.1", 29400, 0, hosts, 1, 3, gpus)
    return plain_environment(SpawnRank(spec, 5, 2, group), group, "run-1", environ)


def test_every_variable_that_torchrun_sets_is_there() -> None:
    own = set(re.findall(r'^ +"([A-Z_]+)":', inspect.getsource(LocalElasticAgent._start_workers), re.MULTILINE))
    assert len(own) > 14
    assert own - set(environment()) == set()


def test_ranks_and_sizes_are_those_of_the_group() -> None:
    env = environment()
    numbers = {name: env[name] for name in env if name.endswith(("RANK", "SIZE"))}
    assert numbers == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "0",
        "ROLE_RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "5",
    }
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "29400")
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "3")
    assert env["TORCHELASTIC_RUN_ID"] == env["FDL_RUN_ID"] == "run-1"


def test_gpu_of_a_rank_is_the_one_with_its_local_rank() -> None:
    env = environment(GPU)
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("GPU-a,GPU-b", "PCI_BUS_ID")
    assert environment()["CUDA_VISIBLE_DEVICES"] == ""


def test_threads_and_error_handling_are_the_users_where_they_say_so() -> None:
    own = {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert own.items() <= environment(**own).items()
    assert int(environment()["OMP_NUM_THREADS"]) >= 1
    assert environment()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_gloo_of_several_hosts_takes_the_interface_that_reaches_rank_0() -> None:
    assert environment(hosts=2)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in environment(hosts=2, GLOO_SOCKET_IFNAME="eth7")
    assert "GLOO_SOCKET_IFNAME" not in environment()


def test_interface_of_an_address_that_cannot_be_reached_is_not_known() -> None:
    assert interface_towards("not an address") == ""
    with pytest.raises(OSError, match=r"."):
        address_towards("not an address")


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1"])
def test_way_to_loopback_begins_there(peer: str) -> None:
    assert address_towards(peer) == peer
