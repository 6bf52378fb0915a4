"""Ranks' lives and the incarnation."""

import pytest

from flodl.core.membership import Membership, RankStatus
from flodl.errors import InvariantViolation
from flodl.messages import Device


def of_hosts(*hosts: str) -> Membership:
    membership = Membership()
    for host in hosts:
        membership.spawn(host, Device("cpu", 0))
    return membership


def live(*hosts: str) -> Membership:
    membership = of_hosts(*hosts)
    for member in membership.all():
        membership.mark_ready(member.rank)
    membership.admit(range(len(hosts)))
    return membership


def test_rank_ids_count_up_in_the_order_of_spawning() -> None:
    membership = of_hosts("a", "b", "a")
    assert [(member.rank, member.host) for member in membership.all()] == [(0, "a"), (1, "b"), (2, "a")]
    assert len(membership) == 3
    assert 2 in membership
    assert 3 not in membership
    assert membership.on_host("a") == (0, 2)
    assert membership.on_host("a", (1, 2)) == (2,)
    assert membership.hosts_of((2, 1, 0)) == ("a", "b")


def test_rank_goes_from_spawned_to_finished() -> None:
    membership = of_hosts("a")
    assert membership.with_status(RankStatus.SPAWNED) == (0,)
    membership.mark_ready(0)
    assert membership.with_status(RankStatus.SPAWNED, RankStatus.READY) == (0,)
    assert membership.live == ()
    assert membership.admit((0,)) == 1
    assert membership.live == (0,)
    membership.finish(0)
    assert membership[0].status is RankStatus.FINISHED


def test_every_change_of_the_live_set_is_a_new_incarnation() -> None:
    membership = live("a", "b", "c")
    assert membership.incarnation == 1
    assert membership.bury(1, "killed") is RankStatus.LIVE
    assert membership.incarnation == 2
    assert (membership.live, membership[1].reason) == ((0, 2), "killed")


@pytest.mark.parametrize("is_ready", [True, False])
def test_death_before_admission_changes_no_incarnation(is_ready: bool) -> None:
    membership = of_hosts("a", "b")
    if is_ready:
        membership.mark_ready(0)
    assert membership.bury(0, "killed") is (RankStatus.READY if is_ready else RankStatus.SPAWNED)
    assert membership.incarnation == 0


@pytest.mark.parametrize("how", ["bury", "finish"])
def test_dead_or_finished_rank_never_comes_back(how: str) -> None:
    membership = live("a", "b")
    membership.bury(0, "killed") if how == "bury" else membership.finish(0)
    with pytest.raises(InvariantViolation, match="rank 0 died while"):
        membership.bury(0, "again")
    with pytest.raises(InvariantViolation, match="not live: cannot become finished"):
        membership.finish(0)
    with pytest.raises(InvariantViolation, match="not spawned: cannot become ready"):
        membership.mark_ready(0)
    with pytest.raises(InvariantViolation, match="not ready: cannot become live"):
        membership.admit((0,))
