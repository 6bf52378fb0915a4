"""What a rank of a plain run finds in its environment: torchrun's contract, and its host's devices.

torchrun's own words are in ``torch/distributed/elastic/agent/server/local_elastic_agent.py``. Two things differ: GPUs
are named by UUID, and the ranks of a host share its cores, where torchrun gives each rank one thread. It is rank 0 that
makes the store (TORCHELASTIC_USE_AGENT_STORE is False), for there is no torch in the daemon.
"""

from collections.abc import Mapping
from typing import Final

from flodl.core.actions import SpawnRank
from flodl.messages import PlainGroup
from flodl_daemon.devices import thread_count
from flodl_daemon.routes import interface_towards

ROLE_NAME: Final = "default"
"""torchrun's, unless it is told another."""


def plain_environment(order: SpawnRank, group: PlainGroup, run_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What is set on top of ``environ``; of that only OMP_NUM_THREADS, TORCH_NCCL_ASYNC_ERROR_HANDLING and
    GLOO_SOCKET_IFNAME count.
    """
    spec, world_size = order.spec, str(order.world_size)
    env = {
        "RANK": str(spec.rank),
        "LOCAL_RANK": str(spec.local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(order.local_world_size),
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_RANK": str(spec.rank),
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": ROLE_NAME,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(group.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(group.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "") or str(thread_count(order.local_world_size)),
        "CUDA_VISIBLE_DEVICES": ",".join(group.gpus),
        "FDL_RUN_ID": run_id,
        "FLODL_ROLE": "plain",
    }
    if group.gpus:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if group.group_world_size > 1 and not environ.get("GLOO_SOCKET_IFNAME"):
        # else Gloo takes the address of the host's name, which on many machines is one of loopback
        interface = interface_towards(group.master_addr)
        env |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return env
