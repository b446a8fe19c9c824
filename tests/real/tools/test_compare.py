"""`stepfs compare` on a real torch series: the questions of a user before choosing."""

import pytest
from harness import FAILURE, USAGE, run, run_json
from series import SHAPES, save_walk

pytestmark = pytest.mark.stepfs

COUNT = 5
LOSSLESS = ["exact", "zstd-3", "zstd-patch-3"]
LOSSY = ["balanced", "compact", "lc-3", "check-n-run-4", "inshrinkerator-4", "gobo-4"]
ROLES = {"weight", "first_moment", "second_moment"}


def parameters():
    count = 0
    for shape in SHAPES.values():
        elements = 1
        for dim in shape:
            elements *= dim
        count += elements
    return count


def test_a_torch_series(plain):
    names = save_walk(plain, COUNT, seed=5)
    temporary = plain / "tmp"
    temporary.mkdir()
    files = [plain / name for name in names]
    before = [path.read_bytes() for path in files]
    report = run_json("compare", *files, "--codecs", ",".join(LOSSLESS + LOSSY), "--dir", temporary, "--json")
    assert not list(temporary.iterdir()), "something is left behind"
    assert [path.read_bytes() for path in files] == before
    assert report["files"] == [str(path) for path in files]
    assert report["parameters"] == parameters()
    codecs = {codec["name"]: codec for codec in report["codecs"]}
    assert list(codecs) == LOSSLESS + LOSSY
    for name, codec in codecs.items():
        assert codec["raw"] == [len(data) for data in before]
        assert codec["total"] == sum(codec["bytes"]) < sum(codec["raw"]), name
        assert codec["bits_per_parameter"] == pytest.approx(8 * codec["total"] / (COUNT * parameters()))
        errors = [codec["error"][of][which] for of in ("of_update", "of_weights") for which in ("rms", "max")]
        assert all(error == 0 for error in errors) if name in LOSSLESS else all(error > 0 for error in errors), name
        if not name.startswith("zstd"):
            assert ROLES <= codec["roles"].keys(), name
            for role in ROLES:
                kept = codec["roles"][role]
                assert kept["bits_per_parameter"] == pytest.approx(32 * kept["bytes"] / kept["raw"]), name
    size = {name: codec["total"] for name, codec in codecs.items()}
    assert size["compact"] < size["balanced"] < size["exact"] < size["zstd-3"]
    assert codecs["balanced"]["error"]["of_update"]["rms"] < codecs["compact"]["error"]["of_update"]["rms"]


def test_files_that_are_lossy_already_are_refused(mount, plain):
    names = save_walk(mount.dir, 4, seed=8)
    save_walk(plain, 4, seed=8)
    mount.sync()
    mount.require_released(*names[:-1])
    codecs = ["--codecs", "exact,balanced"]
    inside = [mount / name for name in names]
    for files, first in [(inside, f"{names[0]} and 2 more"), ([mount.dir], f"{names[0]} and 2 more"),
                         ([plain / names[0], mount / names[1]], names[1])]:
        done = run("compare", *files, *codecs, check=False)
        assert done.returncode == FAILURE and not done.stdout, done.stdout
        assert f"{first}: stepfs has released this with loss (errors up to weight " in done.stderr, done.stderr
        assert "stepfs profile --set exact" in done.stderr
    # Both ways on that the error names: copies from before the release, and a directory that keeps exact files.
    run("compare", plain, *codecs)
    (mount / "trial").mkdir()
    run("profile", "--set", "exact", mount / "trial")
    later = save_walk(mount / "trial", 3, seed=9)
    mount.sync()
    mount.require_released(*(f"trial/{name}" for name in later[:-1]))
    report = run_json("compare", mount / "trial", *codecs, "--json")
    errors = {codec["name"]: codec["error"]["of_update"]["rms"] for codec in report["codecs"]}
    assert errors["exact"] == 0 < errors["balanced"]


def test_wrong_inputs(plain):
    names = save_walk(plain, 2, seed=7)
    small = {"wte.weight": (256, 64), "ln.weight": (128,)}
    other = save_walk(plain, 1, name="other_{}.pt", seed=8, shapes=small)[0]
    (plain / "log.txt").write_text("loss 3.1\n")
    first, second = (plain / name for name in names)
    for arguments, code, words in [
        ([first], FAILURE, "only one checkpoint"),
        ([first, plain / other], FAILURE, "not of the same model"),
        ([first, plain / "log.txt"], FAILURE, "log.txt: not a checkpoint"),
        ([first, plain / "gone.pt"], FAILURE, "No such file"),
        ([first, second, "--codecs", "zip"], FAILURE, "zstd-patch-3"),
        ([], USAGE, "FILES"),
    ]:
        done = run("compare", *arguments, check=False)
        assert done.returncode == code and words in done.stderr and not done.stdout, (arguments, done.stderr)
