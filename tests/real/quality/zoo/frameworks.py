"""Files of frameworks: Trainer's directories, Lightning's .ckpt, DeepSpeed's parts, and the plain files of scripts."""

import torch
from torch import nn

from .adapters import base, judge, pretrained, text
from .keeper import animal, fit, load, require_near, require_no_zero, require_same, require_same_loss

DIM = 128


@animal("checkpoint-{}/model.safetensors", lossy=["transformer.*", "state.*"])
class TrainerDirectory:
    """transformers' Trainer: model.safetensors beside optimizer.pt, scheduler.pt and rng_state.pth."""

    def trainer(self, folder):
        import trainer_jobs as jobs

        return jobs.trainer(folder, base(), jobs.Text(text(256, seed=1)), jobs.Pause(), max_steps=50, save_steps=10, logging_steps=1000,
                            per_device_train_batch_size=8, learning_rate=1e-3)

    def make(self, path, step):
        before = path.parent.parent / f"checkpoint-{step - 10}"
        self.trainer(path.parent.parent).train(resume_from_checkpoint=str(before) if before.exists() else None)

    def use(self, was, now):
        nets = [pretrained(path.parent) for path in (was, now)]
        judge(nets)
        moments = [load(path.parent / "optimizer.pt")["state"] for path in (was, now)]
        for i, slots in moments[0].items():
            require_no_zero(slots["exp_avg_sq"], moments[1][i]["exp_avg_sq"], f"second moments of parameter {i}")


@animal("step={}.ckpt", lossy=["state_dict.*.weight", "state_dict.*.bias", "optimizer_states.*"])
class LightningCheckpoint:
    """Lightning: a .ckpt with model, optimizer, scheduler, loops and callbacks."""

    def __init__(self):
        import lightning_jobs

        self.jobs = lightning_jobs
        self.lit = self.jobs.Regression(DIM)
        self.data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(640, DIM)), 64)

    def make(self, path, step):
        trainer = self.jobs.trainer(max_steps=step, enable_checkpointing=False, limit_val_batches=0, default_root_dir=path.parent)
        before = path.parent / f"step={step - 10}.ckpt"
        trainer.fit(self.lit, self.data, ckpt_path=str(before) if before.exists() else None, weights_only=False)
        trainer.save_checkpoint(path)

    def use(self, was, now):
        losses, x = [], torch.randn(300, DIM, generator=torch.Generator().manual_seed(1))
        for path in (was, now):
            state = load(path)["state_dict"]
            self.lit.load_state_dict(state)
            losses.append((self.lit.eval().net(x) - x.roll(1, 1)).square().mean().item())
            variance = state["net.1.running_var"]
            assert (variance > 0).all()
        require_same_loss(*losses)


@animal("global_step{}/mp_rank_00_model_states.pt", lossy=["module.*", "optimizer_state_dict.*"])
class DeepSpeedStage1:
    """DeepSpeed's layout: bf16 weights in one file, flat fp32 masters with Adam's moments in another."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(DIM, 256), nn.GELU(), nn.Linear(256, DIM)).bfloat16()
        self.flat = nn.Parameter(torch.cat([p.detach().float().flatten() for p in self.net.parameters()]))
        self.optimizer = torch.optim.AdamW([self.flat], 1e-3)

    def make(self, path, step):
        for _ in range(10):
            x = torch.randn(64, DIM, dtype=torch.bfloat16)
            self.net.zero_grad()
            (self.net(x) - x.roll(1, 1)).square().mean().backward()
            self.flat.grad = torch.cat([p.grad.float().flatten() for p in self.net.parameters()])
            self.optimizer.step()
            pieces = self.flat.detach().split([p.numel() for p in self.net.parameters()])
            for parameter, piece in zip(self.net.parameters(), pieces):
                parameter.data.copy_(piece.view(parameter.shape))
        shapes = {name: p.shape for name, p in self.net.named_parameters()}
        torch.save({"module": self.net.state_dict(), "param_shapes": [shapes], "ds_version": "0.19.8", "global_steps": step}, path)
        base_state = self.optimizer.state_dict()
        torch.save({"optimizer_state_dict": {"base_optimizer_state": base_state, "zero_stage": 1, "partition_count": 1,
                                             "single_partition_of_fp32_groups": [self.flat.detach()]}, "ds_version": "0.19.8"},
                   path.parent / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")

    def use(self, was, now):
        losses, x = [], torch.randn(300, DIM, generator=torch.Generator().manual_seed(1))
        for path in (was, now):
            self.net.load_state_dict(load(path)["module"])
            losses.append((self.net(x.bfloat16()).float() - x.roll(1, 1)).square().mean().item())
        require_same_loss(*losses)
        parts = [load(path.parent / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"] for path in (was, now)]
        moments = [part["base_optimizer_state"]["state"][0]["exp_avg_sq"] for part in parts]
        require_no_zero(*moments, "second moments")
        masters = [part["single_partition_of_fp32_groups"][0] for part in parts]
        require_near(*masters, "masters")


class Language:
    """A GPT-2 in training."""

    def __init__(self):
        self.net = base().train()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3)
        # An untrained model has no clear choice.
        self.train(), self.train()

    def train(self):
        for _ in range(10):
            tokens = text(16)
            fit(self.optimizer, lambda: self.net(input_ids=tokens, labels=tokens).loss, 1)


@animal("checkpoint-{}/model.safetensors", lossy=["transformer.*.weight"], small=0.12)
class TransformersAlone(Language):
    """transformers: a series of `save_pretrained`, model-only; the proof holds, and it stays small."""

    def make(self, path, step):
        self.train()
        self.net.save_pretrained(path.parent)

    def use(self, was, now):
        judge([pretrained(path.parent) for path in (was, now)])


@animal("step_{}.pt", lossy=["model.*", "optimizer.state.*"], small=0.08)
class FullCheckpoint(Language):
    """torch.save of a GPT-2 and its AdamW: it stays small."""

    def make(self, path, step):
        self.train()
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}, path)

    def use(self, was, now):
        nets, states = [], [load(was), load(now)]
        for state in states:
            nets.append(base().eval())
            nets[-1].load_state_dict(state["model"])
        judge(nets)
        for i, slots in states[0]["optimizer"]["state"].items():
            require_no_zero(slots["exp_avg_sq"], states[1]["optimizer"]["state"][i]["exp_avg_sq"], f"second moments of parameter {i}")
            require_same(slots["step"], states[1]["optimizer"]["state"][i]["step"], "steps")


@animal("model_step_{}.pt", lossy=["transformer.*.weight", "lm_head.weight"], small=0.12)
class TorchAlone(Language):
    """torch.save of a GPT-2's state dict, model-only; the proof holds, and it stays small."""

    def make(self, path, step):
        self.train()
        torch.save(self.net.state_dict(), path)

    def use(self, was, now):
        nets = []
        for path in (was, now):
            nets.append(base().eval())
            nets[-1].load_state_dict(load(path))
        judge(nets)
