"""From silence to suspect and dead, on two clocks."""

from flodl.core.liveness import Liveness, LivenessSettings, Pulse, PulseChanged

SETTINGS = LivenessSettings(heartbeat_s=1.0, suspect_s=10.0, dead_s=30.0, startup_s=300.0)


def watching(*ranks: int) -> Liveness:
    """One host at 100 s, its ranks heard of once."""
    liveness = Liveness(SETTINGS)
    liveness.watch_host("a", 100.0)
    for rank in ranks:
        liveness.watch_rank(rank, "a", 100.0)
        liveness.hear_rank(rank, 0.0, 100.0)
    return liveness


def test_nobody_watched_means_no_deadline() -> None:
    liveness = Liveness(SETTINGS)
    assert liveness.next_deadline_s() is None
    assert liveness.changes(1e9) == ()
    assert (liveness.host_pulse("a"), liveness.rank_pulse(0), liveness.silence_s("a", 5.0)) == (None, None, None)


def test_silent_host_is_suspect_then_dead_once_each() -> None:
    liveness = watching()
    assert liveness.next_deadline_s() == 110.0
    assert liveness.changes(109.9) == ()
    assert liveness.changes(110.0) == (PulseChanged("a", -1, Pulse.SUSPECT, 10.0),)
    assert liveness.host_pulse("a") is Pulse.SUSPECT
    assert liveness.changes(110.0) == ()
    assert liveness.next_deadline_s() == 130.0
    assert liveness.changes(130.0) == (PulseChanged("a", -1, Pulse.DEAD, 30.0),)
    assert liveness.next_deadline_s() is None
    assert liveness.changes(500.0) == ()


def test_beats_keep_a_host_alive_and_move_its_deadline() -> None:
    liveness = watching()
    for at_s in range(101, 160):
        liveness.hear_host("a", float(at_s))
        assert liveness.changes(float(at_s)) == ()
    assert 159.0 < (liveness.next_deadline_s() or 0.0) <= 169.0
    assert liveness.silence_s("a", 160.0) == 1.0


def test_suspect_that_speaks_is_alive_again() -> None:
    liveness = watching()
    liveness.changes(112.0)
    liveness.hear_host("a", 115.0)
    assert liveness.changes(115.0) == (PulseChanged("a", -1, Pulse.ALIVE, 0.0),)
    assert liveness.next_deadline_s() == 125.0


def test_dead_host_stays_dead() -> None:
    liveness = watching()
    liveness.changes(130.0)
    liveness.hear_host("a", 131.0)
    assert liveness.changes(131.0) == ()
    assert liveness.host_pulse("a") is Pulse.DEAD


def test_rank_has_a_grace_of_its_own_until_it_first_speaks() -> None:
    liveness = watching()
    liveness.watch_rank(3, "a", 100.0)
    for at_s in range(101, 400):
        liveness.hear_host("a", float(at_s))
        assert liveness.changes(float(at_s)) == ()
    liveness.hear_host("a", 400.0)
    assert liveness.changes(400.0) == (PulseChanged("", 3, Pulse.DEAD, 300.0),)


def test_rank_that_has_spoken_is_judged_by_its_own_silence() -> None:
    liveness = watching(3)
    liveness.hear_host("a", 105.0)
    liveness.hear_rank(3, 4.0, 105.0)
    assert liveness.changes(110.9) == ()
    liveness.hear_host("a", 111.0)
    assert liveness.changes(111.0) == (PulseChanged("", 3, Pulse.SUSPECT, 10.0),)
    liveness.hear_host("a", 131.0)
    assert liveness.changes(131.0) == (PulseChanged("", 3, Pulse.DEAD, 30.0),)


def test_first_word_of_a_rank_brings_its_deadline_nearer() -> None:
    liveness = watching()
    liveness.watch_rank(3, "a", 100.0)
    liveness.hear_rank(3, 2.0, 105.0)
    for at_s in (108.0, 112.0):
        liveness.hear_host("a", at_s)
        assert liveness.changes(at_s) == ()
    liveness.hear_host("a", 113.0)
    assert [change.pulse for change in liveness.changes(113.0)] == [Pulse.SUSPECT]


def test_older_word_of_a_rank_does_not_age_it() -> None:
    liveness = watching(3)
    liveness.hear_rank(3, 0.0, 108.0)
    liveness.hear_rank(3, 9.0, 109.0)
    liveness.hear_host("a", 117.0)
    assert liveness.changes(117.9) == ()


def test_rank_is_not_judged_while_its_daemon_is_silent() -> None:
    liveness = watching(3)
    liveness.hear_host("a", 100.5)
    assert liveness.changes(110.0) == (PulseChanged("", 3, Pulse.SUSPECT, 10.0),)
    assert liveness.changes(110.5) == (PulseChanged("a", -1, Pulse.SUSPECT, 10.0),)
    assert liveness.changes(130.4) == ()
    assert liveness.rank_pulse(3) is Pulse.SUSPECT
    assert liveness.changes(130.5) == (PulseChanged("a", -1, Pulse.DEAD, 30.0),)


def test_rank_is_judged_again_when_its_daemon_speaks() -> None:
    liveness = watching(3)
    liveness.changes(125.0)
    liveness.hear_host("a", 129.0)
    liveness.hear_rank(3, 29.0, 129.0)
    assert [(change.host, change.rank, change.pulse) for change in liveness.changes(129.0)] == [
        ("a", -1, Pulse.ALIVE), ("", 3, Pulse.SUSPECT),
    ]  # fmt: skip
    assert liveness.next_deadline_s() == 130.0


def test_forgotten_peers_have_no_pulse() -> None:
    liveness = watching(3, 4)
    liveness.forget_rank(3)
    liveness.forget_rank(9)
    assert (liveness.rank_pulse(3), liveness.rank_pulse(4)) == (None, Pulse.ALIVE)
    liveness.forget_rank(4)
    liveness.forget_host("a")
    liveness.forget_host("b")
    liveness.hear_host("a", 120.0)
    liveness.hear_rank(3, 0.0, 120.0)
    assert liveness.changes(1e9) == ()
    assert liveness.next_deadline_s() is None
