"""How the batches of one window are dealt when an epoch is running out.

Pure functions from plain numbers to plain numbers; nothing is remembered. Within an epoch a window is what ElChe
planned. The epoch's last window takes everything that is left: in proportion, without leaving a rank one single
batch (one step gives no timing sample), and without a rest that would be too small for a window of its own.
"""

from collections.abc import Mapping, Sequence

from flodl.errors import InvariantViolation
from flodl.ids import RankId


def allocate(
    remaining_batches: int, counts: Mapping[RankId, int], held: Mapping[RankId, int] | None = None
) -> dict[RankId, int]:
    """Deal the next window's batches.

    Args:
        remaining_batches: batches of the epoch still to be trained, those in ``held`` included.
        counts: planned batches of a full window, ≥ 1, for every live rank.
        held: batches leased to a rank and not trained yet; they can only be trained there. A rank that is not named
            holds none.

    Returns:
        Batches per rank, each at least what the rank holds. While a full window and one more batch per rank are
        left these are the counts; otherwise it is the last window, and the sum is exactly ``remaining_batches``.
        Ranks of the last window get 0 or at least 2, as far as what they hold allows.

    Raises:
        InvariantViolation: no ranks, a count below 1, a holder that is not live, or more held than remaining.
    """
    holds = _holds_of(remaining_batches, counts, held or {})
    window = {rank: max(count, holds[rank]) for rank, count in counts.items()}
    beyond = remaining_batches - sum(window.values())
    if beyond >= len(counts):
        return window
    slow_first = sorted(counts, key=lambda rank: (counts[rank], -rank))
    if beyond < 0:
        window = _in_proportion(remaining_batches, counts, holds)
    else:
        for rank in sorted(slow_first, key=lambda rank: (counts[rank], window[rank]))[:beyond]:
            window[rank] += 1
    _settle_singles(window, holds, slow_first)
    return window


def equal_shares(
    total_batches: int, ranks: Sequence[RankId], held: Mapping[RankId, int] | None = None
) -> dict[RankId, int]:
    """Deal ``total_batches`` equally, singles included; what does not divide goes to the lowest ranks, one batch each.

    Args:
        total_batches: batches to deal, those in ``held`` included.
        ranks: the live ranks.
        held: as for ``allocate``; a rank that holds more than an equal share keeps it, the others share the rest.

    Raises:
        InvariantViolation: as ``allocate``.
    """
    return ratio_shares(total_batches, dict.fromkeys(ranks, 1), held)


def ratio_shares(
    total_batches: int, weights: Mapping[RankId, int], held: Mapping[RankId, int] | None = None
) -> dict[RankId, int]:
    """Deal ``total_batches`` in proportion to ``weights`` (≥ 1, for every live rank); otherwise as ``equal_shares``."""
    return _in_proportion(total_batches, weights, _holds_of(total_batches, weights, held or {}))


def _holds_of(remaining_batches: int, counts: Mapping[RankId, int], held: Mapping[RankId, int]) -> dict[RankId, int]:
    if not counts or min(counts.values()) < 1:
        raise InvariantViolation(f"every live rank needs a count of at least 1: {dict(counts)}")
    if not held.keys() <= counts.keys() or sum(held.values()) > remaining_batches:
        raise InvariantViolation(f"of {remaining_batches} batches {dict(held)} are held, by ranks {list(counts)}")
    return {rank: held.get(rank, 0) for rank in counts}


def _in_proportion(total: int, counts: Mapping[RankId, int], floor: Mapping[RankId, int]) -> dict[RankId, int]:
    """Largest-remainder shares of ``total``, none below its floor; ranks above their fair share drop out of it."""
    sharing, left, weight = list(counts), total, sum(counts.values())
    while pinned := [rank for rank in sharing if floor[rank] * weight > left * counts[rank]]:
        sharing = [rank for rank in sharing if floor[rank] * weight <= left * counts[rank]]
        left -= sum(floor[rank] for rank in pinned)
        weight = sum(counts[rank] for rank in sharing)
    window = dict(floor)
    for rank in sharing:
        window[rank] = left * counts[rank] // weight
    rest = total - sum(window.values())
    by_remainder = sorted(sharing, key=lambda rank: (-(left * counts[rank] % weight), -counts[rank], rank))
    for rank in by_remainder[:rest]:
        window[rank] += 1
    return window


def _settle_singles(window: dict[RankId, int], held: Mapping[RankId, int], slow_first: Sequence[RankId]) -> None:
    """Leave no rank with one batch: give it to the smallest peer, or, where it is held there, bring a second one."""
    for rank in slow_first:
        if window[rank] == 1 and held[rank] == 0:
            _move_single(window, rank, slow_first)
    for rank in slow_first:
        if window[rank] == 1:
            _bring_second(window, held, rank, slow_first)


def _move_single(window: dict[RankId, int], rank: RankId, slow_first: Sequence[RankId]) -> None:
    peers = [peer for peer in reversed(slow_first) if peer != rank and window[peer] > 0]
    if peers:  # else it is the last batch of all
        smallest = min(peers, key=lambda peer: window[peer])
        window[smallest] += 1
        window[rank] = 0


def _bring_second(
    window: dict[RankId, int], held: Mapping[RankId, int], rank: RankId, slow_first: Sequence[RankId]
) -> None:
    """Take one batch from the largest peer that may give it; one that keeps a single gives that away as well."""
    givers = [peer for peer in slow_first if window[peer] > held[peer] and (window[peer] > 2 or held[peer] == 0)]
    if givers:
        giver = max(givers, key=lambda peer: window[peer])
        window[giver] -= 1
        window[rank] += 1
        if window[giver] == 1:
            _move_single(window, giver, slow_first)
