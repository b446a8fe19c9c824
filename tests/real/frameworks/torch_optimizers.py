"""Every optimizer of torch.optim on a small model, and the roles of its state, taken from torch's sources."""

import torch

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
    "rmsprop_momentum": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "rmsprop_centered": lambda p: torch.optim.RMSprop(p, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}
if hasattr(torch.optim, "Muon"):
    # For matrices only.
    OPTIMIZERS["muon"] = lambda p: torch.optim.Muon([q for q in p if q.dim() == 2])

KINDS = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment", "max_exp_avg_sq": "second_moment", "square_avg": "second_moment",
         "exp_inf": "second_moment", "grad_avg": "first_moment", "acc_delta": "second_moment", "momentum_buffer": "momentum",
         "prev": "momentum", "sum": "square_sum", "ax": "master"}
PARTNERS = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg", "max_exp_avg_sq": "exp_avg", "exp_inf": "exp_avg", "grad_avg": "square_avg"}
# These slots have another divisor than usual.
OTHER_PARTNERS = {("adam_amsgrad", "exp_avg"): "max_exp_avg_sq", ("adamax", "exp_avg"): "exp_inf",
                  ("rmsprop_centered", "square_avg"): "grad_avg"}


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))


def stepped(net, optimizer):
    data = torch.randn(8, 6)

    def closure():
        optimizer.zero_grad()
        loss = net(data).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return optimizer


def expect_model(net, at):
    """{path: [role, of, partner]} of a model's state dict below `at`."""
    parameters = dict(net.named_parameters())
    return {f"{at}/{n}": ["weight" if n in parameters else "other", None, None] for n in net.state_dict()}


def expect_state(optimizer, net, state, at, weights, names=None):
    """The same of an optimizer's state dict below `at`. `weights`: the place of the model, or None. `names`: its parameters in
    the optimizer's order, None for one that cannot be known.
    """
    want = {}
    prefix = f"{at}/" if at else ""
    if names is None:
        names = [n for n, p in net.named_parameters() if optimizer != "muon" or p.dim() == 2]
    for i, slots in state["state"].items():
        for slot, value in slots.items():
            path = f"{prefix}state/{i}/{slot}"
            if isinstance(value, list):  # LBFGS's history
                want |= {f"{path}/{j}": ["optimizer", None, None] for j, v in enumerate(value) if isinstance(v, torch.Tensor)}
            if not isinstance(value, torch.Tensor):
                continue
            kind = KINDS.get(slot, "optimizer")
            of = f"{weights}/{names[i]}" if weights and names[i] and kind != "optimizer" else None
            other = OTHER_PARTNERS.get((optimizer, slot), PARTNERS.get(slot))
            want[path] = [kind, of, f"{prefix}state/{i}/{other}" if other else None]
    return want
