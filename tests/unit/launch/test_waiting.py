"""Whom a run that ends waits for: said once they have been waited for a while, and again when it is somebody else."""

from flodl.launch.waiting import PATIENCE_S, Waiting


def test_what_comes_soon_is_not_talked_about() -> None:
    waiting = Waiting()
    assert waiting.look({"waits_for": ["rank 0 on a"]}, 10.0) == ""
    assert waiting.look({"waits_for": ["rank 1 on a"]}, 10.0 + PATIENCE_S) == ""
    assert waiting.look({"waits_for": []}, 10.0 + 2 * PATIENCE_S) == ""
    assert waiting.look({}, 10.0 + 3 * PATIENCE_S) == ""


def test_who_keeps_a_run_waiting_is_named_once() -> None:
    waiting, state = Waiting(), {"waits_for": [f"rank {rank} on a" for rank in range(9)]}
    assert waiting.look(state, 10.0) == ""
    named = ", ".join(f"rank {rank} on a" for rank in range(8))
    assert waiting.look(state, 10.0 + PATIENCE_S) == f"waiting for {named} and 1 more"
    assert waiting.look(state, 10.0 + 2 * PATIENCE_S) == ""
    assert waiting.whom == f"{named} and 1 more"


def test_head_is_named_with_its_process_and_what_holds_it() -> None:
    waiting, state = Waiting(), {"waits_for": ["the head"], "head": {"pid": 7, "state": "alive"}}
    waiting.look(state, 10.0)
    alive = waiting.look(state, 10.0 + PATIENCE_S)
    assert alive == "waiting for the head (your script on the controller's machine, pid 7)"
    state["head"] = {"pid": 7, "state": "frozen"}
    waiting.look(state, 20.0)
    frozen = waiting.look(state, 20.0 + PATIENCE_S)
    assert frozen.endswith("pid 7, frozen by a signal: kill -CONT 7 lets it go on)")
    waiting.look({"waits_for": ["the head"], "head": None}, 30.0)
    assert waiting.whom == "the head"
