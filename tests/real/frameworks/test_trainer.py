"""transformers' Trainer on a mount: rotation by directory mtime, and resuming, while archiving and releasing go on."""


import pytest
import torch
from series import tensors_of


@pytest.mark.slow
def test_rotation_and_resume(both):
    import trainer_jobs as jobs

    mount = both

    def trainer(steps):
        watch = jobs.Watch(mount)
        return jobs.trainer(mount.dir, jobs.model(96, 3, 4), jobs.noise(64, 1), watch, max_steps=steps, save_steps=5, save_total_limit=2,
                            logging_steps=5, per_device_train_batch_size=4, learning_rate=1e-3), watch

    job, watch = trainer(30)
    job.train()
    assert watch.kept == [[f"checkpoint-{n}" for n in range(max(5, last - 5), last + 1, 5)] for last in range(5, 31, 5)]
    assert not watch.changed, f"stepfs changed the mtime of {watch.changed}"
    assert any(name.endswith("model.safetensors") for name in watch.released), f"released: {watch.released}"

    # The newest is exact: it equals the job's memory.
    final = {name: t.clone() for name, t in job.model.state_dict().items()}
    read = type(job.model).from_pretrained(mount / "checkpoint-30").state_dict()
    assert all(torch.equal(read[name], t) for name, t in final.items())

    # The one before was released; training can resume from both.
    for last, goal in ((25, 30), (30, 35)):
        again, _ = trainer(goal)
        again.train(resume_from_checkpoint=str(mount / f"checkpoint-{last}"))
        assert again.state.global_step == goal
        assert all(torch.isfinite(t).all() for t in tensors_of(again.model.state_dict()).values())

