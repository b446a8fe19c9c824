"""Short runs of two stress scenarios, and tests of the ledger itself: it must find every kind of error.

    scripts/stress.sh                                                                 (the long runs)
"""

import time
from pathlib import Path

import pytest
from stress import report, scenario
from stress.content import Stamp
from stress.driver import Run
from stress.ledger import Ledger

SCENARIOS = Path(__file__).resolve().parents[2] / "stress"
# The first is enough on two idle cores: with the start and the checks at the end half a minute. On a busy machine the programs do
# less in it, so a run that proved too little is done again for longer.
SECONDS = (10, 40, 120)


def scenario_of(name, seconds, did):
    """Runs it; an empty string, or what it did not do. A fault fails the test at once."""
    chosen = scenario.load(SCENARIOS / f"{name}.toml", seconds)
    chosen.daemon |= {"kill_every": 3} if "kill_every" in chosen.daemon else {"remount_every": 4}
    run = Run(chosen)
    try:
        fine = run.run()
        print(report.table(run))
        assert fine, "\n".join(run.failures)
        missing = [what for what in did if not any(counts.get(what) for counts in run.actors.values())]
        if run.counts["kills"] + run.counts["remounts"] == 0:
            missing.append("killed or mounted anew")
        # A run without releases or comparisons proves little.
        if run.counts["released"] <= 5 or sum(counts.get("compared", 0) for counts in run.actors.values()) <= 2:
            missing.append("released and compared often enough")
        return f"nothing was {', '.join(missing)}:\n{report.table(run)}" if missing else ""
    finally:
        run.clean_up(keep=False)


@pytest.mark.stepfs
@pytest.mark.parametrize("name, did", [
    pytest.param("churn", ("removed", "copied", "rewritten"), marks=pytest.mark.alone),
    # test_kill.py kills the daemon for each change.
    pytest.param("kills", ("removed", "moved"), marks=pytest.mark.nightly),
])
def test_scenario(name, did):
    for seconds in SECONDS:
        if not (missing := scenario_of(name, seconds, did)):
            return
    pytest.fail(missing)


def test_every_scenario_can_be_read():
    for path in SCENARIOS.rglob("*.toml"):
        assert scenario.load(path).slots() > 0


def test_what_cannot_be_meant_is_refused(tmp_path):
    for text, words in (("[[actor]]\ndo = 'sing'", "do = 'sing'"), ("[[actor]]\ndo = 'read'\nspare = 1", "unknown spare"), ("seconds = 3", "no [[actor]]")):
        (tmp_path / "x.toml").write_text(text)
        with pytest.raises(scenario.Wrong, match=words.replace("[", r"\[")):
            scenario.load(tmp_path / "x.toml")


# --- the ledger


OLD, NEW = Stamp(1, 0, 1), Stamp(1, 0, 2)


def saved(*stamps, exact=False, in_place=False):
    """A ledger with one series of these states, all closed."""
    ledger = Ledger()
    ledger.begin_series(1, "run-a", exact, False, in_place)
    for stamp in stamps:
        path = path_of(stamp)
        ledger.begin(path, torn=True)
        ledger.closing(stamp, "", {"bytes": f"exact {stamp.number}", "tensors": f"tensors {stamp.number}"}, 100, None)
        ledger.written(path, stamp)
        ledger.saved(1, path, [path])
    return ledger


def path_of(stamp):
    return f"run-a/step_{stamp.number}.pt"


def saw(ledger, stamp, digest, view="bytes", path=None, since=None):
    return ledger.saw(path or path_of(stamp), time.monotonic() if since is None else since, view, stamp, digest, 100)[0]


def test_what_was_written_is_well_and_so_is_a_final_form():
    ledger = saved(OLD, NEW)
    assert saw(ledger, OLD, "exact 1") is None
    assert saw(ledger, OLD, "final 1") is None
    assert saw(ledger, OLD, "final 1") is None
    assert ledger.report()[0] == []


def test_a_final_form_never_changes():
    ledger = saved(OLD, NEW)
    before = time.monotonic()
    assert saw(ledger, OLD, "final 1") is None
    assert saw(ledger, OLD, "exact 1", since=before) is None, "it was opened before that"
    assert "WAS FINAL" in saw(ledger, OLD, "exact 1")
    assert "WAS FINAL" in saw(ledger, OLD, "other")
    assert "WAS FINAL" in saw(ledger, OLD, "tensors 1", "tensors")
    assert len(ledger.report()[0]) == 3


def test_the_newest_is_exact_and_so_is_what_asks_for_it():
    assert "is the newest" in saw(saved(OLD), OLD, "final 1")
    assert "its name asks" in saw(saved(OLD, NEW, exact=True), OLD, "final 1")
    ledger = saved(OLD, NEW)
    ledger.pinned(path_of(OLD))
    assert "is pinned" in saw(ledger, OLD, "final 1")
    ledger.unpinning(path_of(OLD))
    assert saw(ledger, OLD, "final 1") is None
    # A recalled file may have its final form already, though nobody has read that.
    ledger = saved(OLD, NEW)
    ledger.recalling(path_of(OLD))
    ledger.pinned(path_of(OLD))
    assert saw(ledger, OLD, "final 1") is None


def test_files_do_not_vanish_and_do_not_come_back():
    ledger = saved(OLD, NEW)
    assert "is lost" in ledger.missing(path_of(OLD), time.monotonic())
    ledger.begin(path_of(OLD))
    assert ledger.missing(path_of(OLD), time.monotonic()) is None, "somebody is removing it"
    ledger.removed(1, path_of(OLD), [path_of(OLD)])
    assert ledger.missing(path_of(OLD), time.monotonic()) is None
    assert "was removed" in saw(ledger, OLD, "exact 1")


def test_a_part_of_a_file_is_seen_only_while_it_is_written():
    ledger = saved(OLD, NEW)
    assert ledger.unreadable(path_of(OLD), time.monotonic(), "does not load")
    assert "which nobody has written" in saw(ledger, None, "half", path=path_of(OLD))
    assert "100 were written" in ledger.saw(path_of(OLD), time.monotonic(), "bytes", OLD, "half", 50)[0]
    ledger = saved(OLD, NEW)
    ledger.begin(path_of(OLD), torn=True)
    assert ledger.unreadable(path_of(OLD), time.monotonic(), "does not load") is None
    assert saw(ledger, None, "half", path=path_of(OLD)) is None
    before = time.monotonic()
    ledger.written(path_of(OLD), OLD)
    assert ledger.unreadable(path_of(OLD), before, "does not load") is None, "it was when it was opened"
    assert ledger.unreadable(path_of(OLD), time.monotonic(), "does not load")
    # After a rename over it, the file is the one or the other.
    ledger = saved(OLD, NEW)
    ledger.begin(path_of(OLD))
    assert ledger.unreadable(path_of(OLD), time.monotonic(), "does not load")


def test_another_state_under_a_name_is_wrong():
    ledger = saved(OLD, NEW)
    assert "the last that was written" in saw(ledger, OLD, "exact 1", path=path_of(NEW))


def test_what_a_kill_cut_off_may_be_anything_until_it_is_known():
    ledger = saved(OLD)
    ledger.begin(path_of(NEW), torn=True)
    ledger.cut_off(path_of(NEW))
    assert ledger.unsettled() == [path_of(NEW)]
    assert ledger.files()[path_of(NEW)] is False
    assert saw(ledger, None, "half", path=path_of(NEW)) is None
    ledger.settle(path_of(NEW), None, None)
    assert path_of(NEW) not in ledger.files()


def test_what_a_kill_cut_off_may_have_become_the_newest():
    """A rewrite of an old file whose bytes are there, but whose close nobody has seen."""
    ledger = saved(OLD, NEW)
    assert "is the newest" in saw(ledger, NEW, "final 2")
    ledger.begin(path_of(OLD), torn=True)
    ledger.cut_off(path_of(OLD), of=Stamp(1, 0, 3))
    assert saw(ledger, NEW, "final 2") is None


def test_of_two_that_are_written_at_a_time_nobody_knows_which_is_the_newest():
    """A saver and a program that writes into an old file."""
    ledger, other = saved(OLD, NEW), Stamp(1, 0, 3)
    exact = {"bytes": "exact 3", "tensors": "tensors 3"}
    ledger.begin(path_of(OLD), torn=True)
    ledger.closing(other, "", exact, 100, None)
    ledger.begin(path_of(NEW), torn=True)
    ledger.closing(NEW, "", {"bytes": "exact 2", "tensors": "tensors 2"}, 100, None)
    ledger.written(path_of(NEW), NEW)
    ledger.written(path_of(OLD), other)
    assert saw(ledger, NEW, "final 2") is None
    assert saw(ledger, other, "final 3", path=path_of(OLD)) is None
    # One after the other, the result is known.
    last = Stamp(1, 0, 4)
    ledger.begin(path_of(NEW), torn=True)
    ledger.closing(last, "", {"bytes": "exact 4", "tensors": "tensors 4"}, 100, None)
    ledger.written(path_of(NEW), last)
    assert "is the newest" in saw(ledger, last, "final 4", path=path_of(NEW))
