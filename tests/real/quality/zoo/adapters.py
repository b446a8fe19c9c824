"""LoRA: small files beside a base that is never saved."""

import logging

import torch

from .keeper import animal, fit, load, require_choices, require_same_loss

WORDS, DIM = 256, 128
logging.getLogger("peft").setLevel(logging.ERROR)


def base():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=DIM, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                                      resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def pretrained(folder):
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(folder).eval()


def text(count, seed=None):
    """Each token follows from the one before, with some noise."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, WORDS, (count,), generator=generator)]
    for _ in range(23):
        tokens.append((5 * tokens[-1] + torch.randint(0, 4, (count,), generator=generator)) % WORDS)
    return torch.stack(tokens, 1)


def judge(nets):
    """Loss and next tokens of two language models on held-out text."""
    tokens = text(32, seed=4)
    with torch.no_grad():
        outs = [net(input_ids=tokens, labels=tokens) for net in nets]
    require_same_loss(*(out.loss.item() for out in outs))
    require_choices(*(out.logits for out in outs), "next tokens")


class Adapted:
    """A GPT-2 with LoRA on its attention and its feed-forward layers."""

    def __init__(self):
        self.net = self.fresh()
        self.optimizer = torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], 2e-3)

    def fresh(self):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
        return get_peft_model(base(), config)

    def train(self):
        for _ in range(8):
            tokens = text(16)
            fit(self.optimizer, lambda: self.net(input_ids=tokens, labels=tokens).loss, 1)

    def use(self, was, now):
        from peft.utils import load_peft_weights, set_peft_model_state_dict

        nets = []
        for path in (was, now):
            nets.append(self.fresh().eval())
            set_peft_model_state_dict(nets[-1], load_peft_weights(path.parent, device="cpu"))
        judge(nets)


@animal("checkpoint-{}/adapter_model.safetensors", lossy=["*.lora_A.weight", "*.lora_B.weight", "state.*"])
class LoraWithOptimizer(Adapted):
    """peft: adapter_model.safetensors with optimizer.pt beside it."""

    def make(self, path, step):
        self.train()
        self.net.save_pretrained(path.parent)
        torch.save(self.optimizer.state_dict(), path.parent / "optimizer.pt")


@animal("step-{}/adapter_model.safetensors", lossy=["*.lora_A.weight", "*.lora_B.weight"])
class LoraAlone(Adapted):
    """peft: adapter_model.safetensors alone, model-only."""

    def make(self, path, step):
        self.train()
        self.net.save_pretrained(path.parent)


@animal("lora_{}.pt", lossy=["lora.*lora_A*", "lora.*lora_B*", "optimizer.state.*"])
class LoraOneFile(Adapted):
    """LoRA's tensors and AdamW in one .pt, as training scripts write it."""

    def make(self, path, step):
        self.train()
        lora = {name: p.detach() for name, p in self.net.named_parameters() if p.requires_grad}
        torch.save({"lora": lora, "optimizer": self.optimizer.state_dict(), "step": step}, path)

    def use(self, was, now):
        nets = [self.fresh().eval(), self.fresh().eval()]
        for net, path in zip(nets, (was, now)):
            net.load_state_dict(load(path)["lora"], strict=False)
        judge(nets)
