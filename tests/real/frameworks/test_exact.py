"""Files that stay exact: the best of a run as the run's own files name it, links, the highest step. And how lossy files show."""

import hashlib
import json
import os
import shutil
import subprocess

import pytest
import torch
from harness import DAMAGE, FAILURE, OK, run, shell, wait_until
from series import save_walk, walk

pytestmark = pytest.mark.stepfs


def trainer(mount, plain, **options):
    import trainer_jobs as jobs

    return jobs.trainer(mount.dir, jobs.model(64, 2, 2), jobs.noise(32, 1), jobs.Copy(mount, plain), jobs.noise(32, 2), learning_rate=1e-2,
                        per_device_train_batch_size=8, **options)


def is_as_saved(mount, plain, name):
    return subprocess.run(["diff", "-rq", mount / name, plain / name], capture_output=True).returncode == 0


@pytest.mark.slow
def test_trainers_best_model_stays_as_it_was_saved(mount, plain):
    job = trainer(mount, plain, max_steps=25, save_steps=5, eval_strategy="steps", eval_steps=5, load_best_model_at_end=True,
                  metric_for_best_model="eval_loss", greater_is_better=False)
    job.train()
    best = os.path.basename(job.state.best_model_checkpoint)
    assert best in ("checkpoint-5", "checkpoint-10"), best
    mount.sync()
    assert is_as_saved(mount, plain, best) and is_as_saved(mount, plain, "checkpoint-25")
    assert not is_as_saved(mount, plain, "checkpoint-20" if best != "checkpoint-20" else "checkpoint-15")
    assert mount.entry(f"{best}/model.safetensors")["best"] == "checkpoint-25/trainer_state.json"
    # Release by hand refuses both, with a reason. Also after the run was moved and mounted again.
    answer = run("release", mount / best, check=False)
    assert answer.returncode == FAILURE and "names it as the best" in answer.stdout + answer.stderr
    (mount / "moved").mkdir()
    for name in os.listdir(mount.dir):
        if name.startswith("checkpoint-"):
            os.rename(mount / name, mount / "moved" / name)
    mount.remount()
    mount.sync()
    (plain / "moved").mkdir()
    shutil.move(plain / best, plain / "moved" / best)
    assert is_as_saved(mount, plain, f"moved/{best}")


@pytest.mark.slow
def test_the_highest_step_stays_beside_the_newest(mount, plain):
    trainer(mount, plain, max_steps=20, save_steps=4).train()
    trainer(mount, plain, max_steps=10, save_steps=5).train(resume_from_checkpoint=str(mount / "checkpoint-8"))
    mount.sync()
    assert {f"checkpoint-{n}" for n in (4, 8, 10, 12, 16, 20)} <= set(os.listdir(mount.dir))
    # The choice of `resume_from_checkpoint=True`, and the file written last.
    from transformers.trainer_utils import get_last_checkpoint

    assert os.path.basename(get_last_checkpoint(str(mount.dir))) == "checkpoint-20"
    assert is_as_saved(mount, plain, "checkpoint-20") and is_as_saved(mount, plain, "checkpoint-10")
    assert mount.state("checkpoint-16/model.safetensors") == "released"
    again = trainer(mount, plain, max_steps=24, save_steps=4)
    again.train(resume_from_checkpoint=True)
    mount.sync()
    assert mount.state("checkpoint-20/model.safetensors") == "released"
    assert is_as_saved(mount, plain, "checkpoint-24")


def test_lightnings_best_model_stays_as_it_was_saved(mount, plain):
    import lightning_jobs as jobs

    torch.manual_seed(2)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64))
    saver = jobs.Save(dirpath=mount.dir, monitor="val_loss", save_top_k=3, save_last=True)
    saver.plain = plain
    job = jobs.trainer(max_epochs=4, callbacks=[saver], num_sanity_val_steps=0, log_every_n_steps=1)
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    job.fit(jobs.Regression(64), loader, loader)
    best = os.path.basename(saver.best_model_path)
    assert best == "epoch=1-step=8.ckpt"
    mount.sync()
    assert (mount / best).read_bytes() == (plain / best).read_bytes()
    assert mount.released(), mount.states()
    assert mount.entry(best)["best"].endswith(".ckpt")
    assert torch.load(mount / best, weights_only=False)["global_step"] == 8


def test_a_copy_of_a_lossy_file_says_what_it_is(mount, plain):
    names = save_walk(mount.dir, 4, seed=31)
    mount.sync()
    mount.require_released(names[1])
    shell(f"cp {mount / names[1]} {mount / 'best_model.pt'}")
    mount.sync()
    entry = mount.entry("best_model.pt")
    assert entry["is_less_than_asked"] and entry["asked"] == "exact" and entry["lossy"].startswith("1 ")
    line = next(line for line in run("ls", mount.dir).stdout.splitlines() if line.endswith("best_model.pt"))
    assert "LOSSY" in line
    value = lambda name: shell(f"getfattr -n user.stepfs.{name} --only-values {mount / 'best_model.pt'}").stdout
    assert value("lossy") == entry["lossy"] and value("profile") == "exact; its bytes are balanced"
    assert f"best_model.pt: is a copy of {names[1]}, which is lossy (balanced), but exact is asked for" in mount.log.read_text()
    # Until it is replaced.
    shell(f"cp {mount / names[3]} {mount / 'best_model.pt'}")
    mount.sync()
    assert value("lossy") == "0" and not mount.entry("best_model.pt")["is_less_than_asked"]


def test_what_a_link_named_best_leads_to_stays_exact(mount, plain):
    names = save_walk(plain, 4, seed=33)
    for at, name in enumerate(names):
        shutil.copy(plain / name, mount / name)
        if at == 0:
            os.symlink(name, mount / "best.pt")
    mount.sync()
    assert mount.released() == names[1:3]
    assert (mount / "best.pt").read_bytes() == (plain / names[0]).read_bytes()
    # A newer one takes its place, as scripts do it.
    os.symlink(names[3], mount / "best.pt.new")
    os.replace(mount / "best.pt.new", mount / "best.pt")
    wait_until(lambda: mount.state(names[0]) == "released", 30, "the link leads elsewhere")


def test_a_link_named_best_may_lead_through_another_link(mount, plain):
    names = save_walk(plain, 5, seed=37)
    shutil.copy(plain / names[0], mount / names[0])
    os.symlink(names[0], mount / "current.pt")
    os.symlink("current.pt", mount / "best.pt")
    for name in names[1:3]:
        shutil.copy(plain / name, mount / name)
    mount.sync()
    assert mount.released() == [names[1]]
    os.symlink(names[2], mount / "new")
    os.replace(mount / "new", mount / "current.pt")
    wait_until(lambda: mount.state(names[0]) == "released", 30, "the link leads elsewhere")
    for name in names[3:]:
        shutil.copy(plain / name, mount / name)
    mount.sync()
    assert mount.state(names[2]) != "released"
    assert (mount / "best.pt").read_bytes() == (plain / names[2]).read_bytes()


def test_a_number_that_json_lacks_hides_no_best_checkpoint(mount, plain):
    """Trainer writes NaN for a norm that overflowed."""
    for step, state in zip((40, 50, 60), walk(3, seed=38)):
        for folder in (mount.dir, plain):
            (folder / f"checkpoint-{step}").mkdir()
            torch.save(state, folder / f"checkpoint-{step}/model.pt")
            told = {"best_model_checkpoint": "out/checkpoint-40", "log_history": [{"grad_norm": float("nan"), "step": 1}]}
            (folder / f"checkpoint-{step}/trainer_state.json").write_text(json.dumps(told))
    mount.sync()
    assert [mount.state(f"checkpoint-{step}/model.pt") for step in (40, 50)] != ["released", "released"]
    assert is_as_saved(mount, plain, "checkpoint-40") and not is_as_saved(mount, plain, "checkpoint-50")


def against(mount, manifest, place=None):
    answer = run("verify", "--json", "--against", manifest, place or mount.dir, check=False)
    return answer.returncode, {row["name"]: row["verdict"] for row in json.loads(answer.stdout)["files"]}


def test_a_manifest_tells_what_has_become_of_each_file(mount, plain, tmp_path):
    # Of the saved bytes, not of the mount's: a file may be released before it is hashed.
    names = save_walk(plain, 4, seed=35)
    (plain / "runs").mkdir()
    (plain / "runs/a\nb.txt").write_text("small")
    manifest = tmp_path / "SHA256SUMS"
    shell(f"sha256sum *.pt runs/* > {manifest}", cwd=plain)
    originals = {name: hashlib.sha256((plain / name).read_bytes()).hexdigest() for name in names}
    shell(f"cp -r --preserve=timestamps . {mount.dir}", cwd=plain)
    mount.sync()
    released = mount.released()
    assert released
    assert all(mount.entry(name)["original"] == originals[name] for name in released)
    code, verdicts = against(mount, manifest)
    assert code == OK
    assert verdicts == {**{name: "lossy" if name in released else "same" for name in names}, "runs/a\nb.txt": "same"}
    # sha256sum alone cannot know this.
    check = shell(f"sha256sum --quiet -c {manifest}", cwd=mount.dir, check=False)
    assert {line.split(":")[0] for line in check.stdout.splitlines()} == set(released)
    # Every later reader gets the lossy bytes, so a manifest of these holds.
    shell(f"sha256sum *.pt > {manifest}.now", cwd=mount.dir)
    mount.remount()
    assert against(mount, f"{manifest}.now") == (OK, dict.fromkeys(names, "same"))
    # Without a mount, by the store.
    mount.umount()
    assert against(mount, manifest, mount.store)[0] == OK
    mount.mount()
    os.remove(mount / names[0])
    (mount / names[3]).write_bytes(b"other")
    code, verdicts = against(mount, manifest)
    assert code == DAMAGE
    assert (verdicts[names[0]], verdicts[names[1]], verdicts[names[3]]) == ("missing", "lossy", "differs")
    done = run("verify", "--against", manifest, mount.dir, check=False)
    assert f"{names[0]}: MISSING" in done.stdout, done
    assert f"{names[1]}: lossy now, made from exactly those bytes" in done.stdout
    for text in ("", "no manifest\n", "abc  step_0001.pt\n"):
        manifest.write_text(text)
        assert run("verify", "--against", manifest, mount.dir, check=False).returncode == FAILURE
