"""`import stepfs`: the package over the program's answers, its callbacks, its page, and its types."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import stepfs
import torch
from harness import BIN, FAILURE, LET_GO, ROOT, USAGE, is_mounted, run, run_json
from series import save_walk, torch_bytes, walk

pytestmark = pytest.mark.stepfs
PACKAGE = ROOT / "python"
SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    """The program under test is the one that the package finds."""
    monkeypatch.setenv("PATH", f"{Path(BIN).resolve().parent}:{os.environ['PATH']}")
    assert Path(stepfs._program.program()).samefile(BIN), "another stepfs lies beside the interpreter"


# --- mounting


def test_a_mount_ends_with_its_body(plain):
    store, point = plain / "store", plain / "mnt"
    with stepfs.mount(store, point, profile="exact", memory="64M") as directory:
        assert directory == point and is_mounted(point)
        (directory / "file").write_text("x")
    assert not is_mounted(point) and 'default_profile = "exact"' in (store / "stepfs.toml").read_text()
    with pytest.raises(ZeroDivisionError), stepfs.mount(store, point) as directory:
        assert (directory / "file").read_text() == "x" and 1 / 0
    assert not is_mounted(point)


def test_a_mount_that_was_there_stays(mount):
    with stepfs.mount(mount.store, mount.dir):
        pass
    with pytest.raises(ZeroDivisionError), stepfs.mount(mount.store, mount.dir):
        assert 1 / 0
    assert is_mounted(mount.dir)
    # A dead mount is none: the new one is the body's.
    mount.kill()
    with stepfs.mount(mount.store, mount.dir):
        assert is_mounted(mount.dir)
    assert not is_mounted(mount.dir)


def test_a_program_that_holds_the_mount_is_named_and_hides_no_exception(plain, caplog):
    store, point = plain / "store", plain / "mnt"
    with pytest.raises(stepfs.Error, match=f"\\({os.getpid()}\\)") as raised:
        with stepfs.mount(store, point) as directory:
            held = open(directory / "file", "w")
    held.close()
    assert raised.value.code == FAILURE and is_mounted(point)
    run("umount", point)
    with pytest.raises(ZeroDivisionError):
        with stepfs.mount(store, point) as directory, open(directory / "file") as held:
            held = os.dup(held.fileno())
            assert 1 / 0
    os.close(held)
    assert f"({os.getpid()})" in caplog.text
    run("umount", point)


def test_a_forked_process_unmounts_nothing(plain):
    program = """if True:
        import os, sys, stepfs
        with stepfs.mount(*sys.argv[1:]) as directory:
            if os.fork() == 0:
                sys.exit()
            os.wait()
            assert os.path.ismount(directory)
    """
    subprocess.run([sys.executable, "-c", program, plain / "store", plain / "mnt"], check=True, env={**os.environ, "PYTHONPATH": str(PACKAGE)})
    assert not is_mounted(plain / "mnt")


# --- answers


def test_the_list_is_that_of_ls(mount):
    names = save_walk(mount.dir, 4, name="step_{}.pt", seed=3)
    (mount / "run/checkpoint-7").mkdir(parents=True)
    for name in ("model.pt", "optimizer.pt"):
        torch.save(next(walk(1, seed=1)), mount / "run/checkpoint-7" / name)
    whole = (mount / names[3]).read_bytes()
    (mount / "step_9.pt").write_bytes(whole[: len(whole) // 2])
    stepfs.pin(mount / names[3])
    stepfs.sync(mount.dir)
    found = {str(checkpoint.path.relative_to(mount.dir)): checkpoint for checkpoint in stepfs.ls(mount.dir)}
    rows = {row["path"]: row for row in run_json("ls", "--json", mount.dir)}
    lines = [line.rsplit(None, 1) for line in run("ls", mount.dir).stdout.splitlines()[1:-1]]
    assert list(found) == [path.rstrip("/") for _, path in lines]
    assert all(checkpoint.faithful in words for checkpoint, (words, _) in zip(found.values(), lines))
    for name in names:
        checkpoint, row = found[name], rows[name]
        assert (checkpoint.size, checkpoint.stored, checkpoint.step) == (row["logical_bytes"], row["stored_bytes"], row["step"])
        assert checkpoint.time == pytest.approx((mount / name).stat().st_mtime, abs=1e-3) and checkpoint.files == (mount / name,)
    assert found[names[1]].error_updates == rows[names[1]]["error_updates"] > 0
    assert found[names[3]].error_updates == 0 and found[names[3]].pinned and not found[names[1]].pinned
    directory = found["run/checkpoint-7"]
    assert directory.step == 7 and directory.size == sum(file.stat().st_size for file in directory.files) and len(directory.files) == 2
    assert "cut short" in found["step_9.pt"].cut_short and not found["step_9.pt"].whole and found[names[3]].whole
    assert [checkpoint.path for checkpoint in stepfs.ls(mount / names[0])] == [mount / names[0]]
    stepfs.unpin(mount / names[3])
    assert not stepfs.ls(mount / names[3])[0].pinned
    assert stepfs.why(mount / names[1]) == {mount / names[1]: run("why", mount / names[1]).stdout.strip().partition(": ")[2]}
    mount.umount()
    assert [checkpoint.path for checkpoint in stepfs.ls(mount.store)] == [Path(name) for name in found]


def test_the_newest_and_the_best(mount, caplog, monkeypatch):
    assert stepfs.latest(mount.dir) is None and stepfs.best(mount.dir) is None
    for step, (state, loss) in enumerate(zip(walk(3, seed=9), (0.5, 0.2, 0.3)), 1):
        torch.save(state, mount / f"epoch={step}-val_loss={loss}.ckpt")
    stepfs.sync(mount.dir)
    assert stepfs.latest(mount.dir) == mount / "epoch=3-val_loss=0.3.ckpt" and stepfs.best(mount.dir) == mount / "epoch=2-val_loss=0.2.ckpt"
    assert [checkpoint.best for checkpoint in stepfs.ls(mount.dir)] == [False, True, False]
    monkeypatch.chdir(mount.base)
    assert stepfs.latest("mnt") == Path("mnt/epoch=3-val_loss=0.3.ckpt")
    (mount / "epoch=4.ckpt").write_bytes((mount / "epoch=1-val_loss=0.5.ckpt").read_bytes()[:9000])
    stepfs.sync(mount.dir)
    assert stepfs.latest(mount.dir).name.startswith("epoch=3") and "newer, but not whole" in caplog.text


def test_the_status_is_that_of_the_program(mount):
    save_walk(mount.dir, 3)
    stepfs.sync(mount.dir)
    now, said = stepfs.status(mount.dir), run_json("status", "--json", mount.dir)
    assert (now.files, now.released, now.logical_bytes, now.stored_bytes) == (3, 2, said["logical_bytes"], said["stored_bytes"])
    assert (now.mount, now.store, now.problems) == (mount.dir, mount.store, ()) and now.answer["daemon"] == mount.pid
    assert mount.dir in [one.mount for one in stepfs.status()]
    assert stepfs.status(mount.store).mount is None
    (mount / "step_0004.pt").write_bytes((mount / "step_0003.pt").read_bytes()[:-9000])
    stepfs.sync(mount.dir)
    (problem,) = stepfs.status(mount.dir).problems
    assert problem.kind == "cut-short" and "step_0004.pt" in problem.says and "stepfs latest" in problem.mend


def test_tools_on_files(plain):
    names = save_walk(plain, 3, name="step_{}.pt")
    a, b, c = (plain / name for name in names)
    difference = stepfs.diff(a, b)
    said = run_json("diff", "--json", a, b)
    assert [change.tensor for change in difference.tensors] == [row["tensor"] for row in said["tensors"]] and difference.only_in_a == ()
    for change, row in zip(difference.tensors, said["tensors"]):
        assert (change.relative, change.changed, change.shape) == (row["relative"], row["changed"], tuple(row["shape"]))
    state = lambda path: torch.load(path)["model"]
    key = next(iter(state(a)))
    assert stepfs.merge([a, b, c], plain / "mean.pt", weights=[1, 0, 1]) == plain / "mean.pt"
    with pytest.raises(TypeError, match="list of checkpoints"):
        stepfs.merge(str(a), plain / "none.pt")
    assert torch.allclose(state(plain / "mean.pt")[key], (state(a)[key] + state(c)[key]) / 2)
    out = stepfs.convert(a, plain / "a.safetensors", only="weights", dtype="bf16", strip_prefix="model")
    from safetensors.torch import load_file

    assert torch.equal(load_file(out)[key], state(a)[key].bfloat16())
    with pytest.raises(stepfs.Error, match="--ema 2"):
        stepfs.merge([a, b], plain / "none.pt", ema=2)
    assert not (plain / "none.pt").exists()


# --- names


def test_any_name(mount, monkeypatch):
    """Names that are not UTF-8, and names that look like options."""
    for name in (b"step_1\xff.pt", b"--json", b"-o"):
        (mount / os.fsdecode(name)).write_bytes(torch_bytes(next(walk(1))))
    stepfs.sync(mount.dir)
    odd = mount.dir / os.fsdecode(b"step_1\xff.pt")
    assert sorted(stepfs.ls(os.fsencode(mount.dir)), key=lambda found: found.path)[-1].path == odd
    stepfs.pin(odd)
    assert stepfs.ls(odd)[0].pinned and odd in stepfs.why(mount.dir)
    monkeypatch.chdir(mount.dir)
    for name in ("--json", b"-o"):
        stepfs.pin(name)
        assert stepfs.ls(name)[0].pinned and list(stepfs.why(name)) == [Path(os.fsdecode(name))]
    assert stepfs.diff("-o", "--json").only_in_b == ()
    monkeypatch.chdir(mount.base)
    torch.save({"w": torch.ones(8, 8)}, "-a")
    assert stepfs.merge(["-a", "-a"], "-out") == Path("-out") and torch.load("-out")["w"].sum() == 64


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a mount namespace: tests beside this one read the list of mounts as text")
def test_a_mount_whose_name_is_not_text(plain):
    torch.save(next(walk(1)), plain / "saved.pt")
    program = """if True:
        import os, shutil, sys, stepfs
        store, point = (os.path.join(os.fsencode(sys.argv[1]), name) for name in (b"store\\xfe", b"mnt\\xff"))
        with stepfs.mount(store, point) as directory:
            shutil.copy(os.path.join(sys.argv[1], "saved.pt"), directory / "step_1.pt")
            stepfs.sync(directory)
            assert stepfs.latest(directory) == directory / "step_1.pt" == stepfs.ls(point)[0].path
            assert os.fsencode(directory) == point and directory in [one.mount for one in stepfs.status()]
            assert os.fsencode(stepfs.status(directory).store) == store
        assert not os.listdir(point)
    """
    alone = ["unshare", "--mount", "bash", "-c", f'{LET_GO}; exec "$@"', "bash"]
    done = subprocess.run([*alone, sys.executable, "-c", program, plain], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(PACKAGE)})
    assert done.returncode == 0, done.stderr


# --- errors


def test_errors_have_the_programs_words_and_code(mount, plain):
    for call in (stepfs.ls, stepfs.status, stepfs.latest, stepfs.best, stepfs.pin, stepfs.sync, stepfs.why):
        with pytest.raises(stepfs.Error) as raised:
            call(plain)
        done = run(call.__name__, plain, check=False)
        assert (raised.value.code, f"stepfs: {raised.value}\n") == (done.returncode, done.stderr) and done.returncode == FAILURE
    with pytest.raises(stepfs.Error, match="write exact, balanced or compact") as raised, stepfs.mount(plain / "s", plain / "m", profile="best"):
        pass
    assert raised.value.code == USAGE and not (plain / "m").exists()
    with pytest.raises(stepfs.Error, match="No such file"):
        stepfs.latest(mount / "none")
    for call in (stepfs.ls, stepfs.status):
        with pytest.raises(stepfs.Error, match="is a mirror; name a path"):
            call(f"file://{plain}")


def test_without_the_program(monkeypatch, plain):
    monkeypatch.setenv("PATH", str(plain))
    with pytest.raises(stepfs.Error) as raised:
        stepfs.status()
    assert str(plain) in str(raised.value) and str(Path(sys.executable).parent) in str(raised.value) and raised.value.code is None
    # One of another version answers in another form, or is none.
    (plain / "stepfs").write_text("#!/bin/sh\necho '{\"other\": 1}'\n")
    (plain / "stepfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{plain}:/bin")
    with pytest.raises(stepfs.Error, match="another form"):
        stepfs.ls("/")
    (plain / "stepfs").write_text("#!/no/such/interpreter\n")
    with pytest.raises(stepfs.Error, match="cannot be run"):
        stepfs.ls("/")


# --- callbacks

KEYS = ("queued", "logical_bytes", "stored_bytes")


def numbers(logged):
    return [{key: row[f"stepfs/{key}"] for key in KEYS} for row in logged if "stepfs/queued" in row]


@pytest.mark.slow
def test_trainer_logs_the_status(mount, caplog):
    import trainer_jobs as jobs

    job = jobs.trainer(mount.dir, jobs.model(64, 2, 2), jobs.noise(32, 1), jobs.Watch(mount), max_steps=9, save_steps=3,
                       per_device_train_batch_size=4)
    job.add_callback(stepfs.callbacks.TrainerCallback(job))
    job.train()
    logged = numbers(job.state.log_history)
    # The job waits for stepfs after each save, so nothing has changed since the last.
    status = mount.status()
    assert len(logged) == 3 and logged[-1] == {key: status[key] for key in KEYS}
    assert 0 < logged[0]["logical_bytes"] < logged[1]["logical_bytes"] < logged[2]["logical_bytes"]
    # A call that fails warns once, and training goes on.
    mount.umount()
    again = jobs.trainer(mount.dir, jobs.model(64, 2, 2), jobs.noise(32, 1), jobs.TrainerCallback(), max_steps=3, save_steps=1,
                         per_device_train_batch_size=4)
    again.add_callback(stepfs.callbacks.TrainerCallback(again))
    again.train()
    assert again.state.global_step == 3 and numbers(again.state.log_history) == []
    assert caplog.text.count("logs no numbers") == 1


@pytest.mark.slow
def test_lightning_logs_the_status(mount, caplog):
    import lightning_jobs as jobs
    from pytorch_lightning.loggers import CSVLogger

    class Kept(CSVLogger):
        rows = []

        def log_metrics(self, metrics, step=None):
            self.rows.append({**metrics, "step": step})

    def fit(directory):
        Kept.rows = []
        saver = jobs.ModelCheckpoint(dirpath=directory, every_n_train_steps=2, save_top_k=-1)
        options = {"max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": [saver, stepfs.callbacks.LightningCallback()]}
        job = jobs.lightning.Trainer(accelerator="cpu", logger=Kept(mount.base / "logs"), enable_progress_bar=False,
                                     enable_model_summary=False, **options)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 64)), batch_size=16)
        job.fit(jobs.Regression(64), loader, loader)
        return job

    job = fit(mount.dir)
    logged = numbers(Kept.rows)
    assert len(logged) == 4 and [row["step"] for row in Kept.rows if "stepfs/queued" in row] == [2, 4, 6, 8]
    sizes = [file.stat().st_size for file in sorted(mount.dir.iterdir(), key=lambda file: file.stat().st_mtime)]
    assert [row["logical_bytes"] for row in logged] == [sum(sizes[: n + 1]) for n in range(4)]
    # Nothing changes any more, so the next numbers are those of the program.
    mount.sync()
    callback = next(callback for callback in job.callbacks if isinstance(callback, stepfs.callbacks.LightningCallback))
    callback.on_save_checkpoint(job, job.lightning_module, {})
    callback.on_fit_end(job, job.lightning_module)
    status = mount.status()
    assert numbers(Kept.rows)[-1] == {key: status[key] for key in KEYS} and status["stored_bytes"] < status["logical_bytes"]
    fit(mount.base / "plain")
    assert numbers(Kept.rows) == [] and caplog.text.count("logs no numbers") == 1


def test_callbacks_log_the_numbers_of_status(mount):
    save_walk(mount.dir, 8)
    mount.sync()
    status = mount.status()
    numbers = stepfs.callbacks.Numbers().of(mount.dir)
    assert numbers == {f"stepfs/{name}": status[name] for name in ("queued", "logical_bytes", "stored_bytes")}
    assert numbers["stepfs/logical_bytes"] > numbers["stepfs/stored_bytes"] > 0


# --- the package


def test_importing_needs_no_library():
    program = "import sys, stepfs; print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers', 'pytorch_lightning')))"
    done = subprocess.run([sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); {program}"], capture_output=True, text=True)
    assert done.stdout == "[]\n", done
    with pytest.raises(AttributeError):
        stepfs.callbacks.KerasCallback


def test_the_examples_of_the_page_run(plain, monkeypatch, capsys):
    monkeypatch.chdir(plain)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/PYTHON.md").read_text(), re.DOTALL)
    space = {}
    assert len(blocks) == 4
    for block in blocks:
        exec(block, space)
    said = capsys.readouterr().out
    assert re.search(r"step_20.pt: \d+%, .* update", said) and "step_60.pt: it is the newest of its lineage" in said
    assert "exit code 1: / is neither a stepfs store nor" in said and "changed most" in said and Path("model.safetensors").exists()
    # A second run goes on from the first.
    exec(blocks[0], space)
    assert space["first"] == 60 and space["step"] == 120 and not is_mounted(plain / "ckpts")


@pytest.mark.slow
def test_types():
    """The whole package passes mypy in its strict mode. The libraries of the callbacks are not read: that takes minutes."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-site-packages", "--ignore-missing-imports", "--cache-dir=/dev/null", "stepfs"]
    done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    program = "import stepfs\nstepfs.ls(3)\nx: int = stepfs.latest('/')\ny: stepfs.Status = stepfs.status()\n"
    done = subprocess.run([*command[:-1], "-c", program], cwd=PACKAGE, capture_output=True, text=True)
    assert done.returncode == 1 and "Found 3 errors" in done.stdout, done.stdout


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_oldest_python_reads_it(source):
    tree = ast.parse(source.read_text(), feature_version=(3, 8))
    names = {node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in ast.walk(tree)
             if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)}
    allowed = sys.stdlib_module_names | {"transformers", "pytorch_lightning", "lightning"}
    assert {name.split(".")[0] for name in names} <= allowed
    public = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")]
    undocumented = [node.name for node in public if not ast.get_docstring(node) and node.name in stepfs.__all__]
    assert ast.get_docstring(tree) and not [name for name in undocumented if name != "status"]
