"""JAX with optax's Adam: Orbax's CheckpointManager, Flax's msgpack files, and Equinox's leaves one after another."""

import equinox
import flax
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import points
from flax.training import checkpoints
from job import KEEP

flax.config.update("flax_use_orbax_checkpointing", False)
ADAM = optax.adam(1e-3)


def logits(params, x):
    for number in range(3):
        layer = params[f"dense_{number}"]
        x = x @ layer["kernel"] + layer["bias"]
        x = jnp.tanh(x) if number < 2 else x
    return x


@jax.jit
def loss_of(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


@jax.jit
def update(params, state, x, y):
    updates, state = ADAM.update(jax.grad(loss_of)(params, x, y), state, params)
    return optax.apply_updates(params, updates), state


def build():
    params = jax.tree.map(jnp.asarray, points.start())
    return {"params": params, "opt_state": ADAM.init(params)}


def step_on(tree, step, seed):
    params, state = update(tree["params"], tree["opt_state"], *points.batch(step, seed))
    return {"params": params, "opt_state": state}


def orbax(job):
    options = ocp.CheckpointManagerOptions(max_to_keep=KEEP, create=True, enable_async_checkpointing=False)
    return ocp.CheckpointManager(job.folder, options=options)


def train(job):
    tree, manager = build(), orbax(job) if job.variant == "orbax" else None
    for step in job.steps():
        tree = step_on(tree, step, job.seed)
        if not job.due(step):
            continue
        if manager:
            manager.save(step, args=ocp.args.PyTreeSave(tree))
            manager.wait_until_finished()
        elif job.variant == "flax":
            checkpoints.save_checkpoint(str(job.folder), tree, step, keep=KEEP)
        else:
            equinox.tree_serialise_leaves(job.folder / f"step_{step}.eqx", tree)
            job.rotate("step_*")
        job.saved()


def resume(job):
    tree = build()
    if job.variant == "orbax":
        tree = orbax(job).restore(job.at, args=ocp.args.PyTreeRestore(tree))
    elif job.variant == "flax":
        tree = checkpoints.restore_checkpoint(str(job.folder), tree, step=job.at)
    else:
        tree = equinox.tree_deserialise_leaves(job.folder / f"step_{job.at}.eqx", tree)
    for step in job.steps():
        tree = step_on(tree, step, job.seed)
    return loss_of(tree["params"], *points.HELD_OUT)
