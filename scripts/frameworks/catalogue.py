"""The writers of the table, in its order."""

from dataclasses import dataclass

from job import EVERY


@dataclass
class Entry:
    name: str  # on the command line
    says: str  # in the table
    module: str
    packages: tuple  # the first gives the version
    variant: str = ""
    environment: int = 1  # 1: the tests' own; 2: the one that frameworks.sh makes beside it
    ranks: int = 1
    scale: float = 1  # steps that a number in a name stands for,
    first: int = 0  # and the number of the first checkpoint, less one
    last_number: bool = False
    note: str = ""

    def step(self, number):
        return round((number - self.first) * self.scale)


ONE = [
    Entry("torch", "`torch.save`, weights and AdamW in one file", "torch_save", ("torch",)),
    Entry("torch-weights", "`torch.save` of the weights alone", "torch_save", ("torch",), "weights",
          note="No optimizer is in the file. Two successive states show that the matrices are trained; vectors stay exact."),
    Entry("torch-legacy", "`torch.save`, as before torch 1.6", "torch_save", ("torch",), "legacy"),
    Entry("safetensors", "`safetensors.torch.save_file`, weights and moments", "safetensors_file", ("safetensors",)),
    Entry("trainer", "Trainer, `save_total_limit`", "trainer", ("transformers",)),
    Entry("trainer-lora", "Trainer with PEFT: LoRA", "trainer", ("peft", "transformers"), "lora"),
    Entry("accelerate", "Accelerate, `save_state`, `total_limit`", "accelerator", ("accelerate",), scale=EVERY, first=-1),
    Entry("lightning", "Lightning's ModelCheckpoint, `save_top_k`", "lightning", ("pytorch-lightning",), last_number=True),
    Entry("lightning-last", "the same with `save_last`", "lightning", ("pytorch-lightning",), "last", last_number=True,
          note="`last.ckpt` is rewritten in place at each save. It is the newest of its own lineage, stays a whole file, and "
               "is not in the percentages."),
    Entry("dcp", "torch's distributed checkpoint, FSDP2 on 2 ranks", "dcp", ("torch",), ranks=2),
    Entry("dcp-async", "the same, `async_save`", "dcp", ("torch",), "async", ranks=2),
    Entry("dcp-hf", "the same, `HuggingFaceStorageWriter`", "dcp", ("torch",), "hf", ranks=2),
    Entry("keras", "Keras 3, `model.save`", "keras", ("keras",), "keras"),
    Entry("keras-weights", "Keras 3, `save_weights`", "keras", ("keras", "h5py"), "weights"),
    Entry("keras-h5", "Keras 3, legacy `.h5`", "keras", ("keras", "h5py"), "h5",
          note="Keras cannot train on with the Adam that it loads from such a file, in a plain directory either. So the resume "
               "begins a new one."),
    Entry("npz", "`numpy.savez`: a network and its Adam", "numpy_arrays", ("numpy",), "npz"),
    Entry("npy", "`numpy.save`: all values in one array", "numpy_arrays", ("numpy",), "npy",
          note="Nothing in an array says what it holds, so it loses nothing."),
    Entry("sb3", "stable-baselines3, PPO, CheckpointCallback", "stable_baselines", ("stable-baselines3",), scale=1 / 25,
          note="The file is a zip with torch files in it. The optimizer in one of them proves the weights in another."),
]
TWO = [
    Entry("deepspeed-1", "DeepSpeed, ZeRO 1, bf16, 2 ranks", "zero", ("deepspeed",), "1", environment=2, ranks=2,
          note="DeepSpeed keeps the bf16 weights of all ranks in one flat tensor, and each rank its share of the fp32 masters "
               "in a file of its own. stepfs quantizes both, each on its own: an object never needs another file's."),
    Entry("deepspeed-2", "DeepSpeed, ZeRO 2", "zero", ("deepspeed",), "2", environment=2, ranks=2,
          note="As ZeRO 1."),
    Entry("deepspeed-3", "DeepSpeed, ZeRO 3", "zero", ("deepspeed",), "3", environment=2, ranks=2,
          note="The bf16 weights are not in the files: DeepSpeed rounds them from the masters."),
    Entry("torchtitan", "torchtitan's CheckpointManager, FSDP2, `keep_latest_k`", "titan", ("torchtitan", "torch"), environment=2, ranks=2,
          note="The weights lie at the root of the checkpoint, beside `optimizer`. stepfs knows them by the optimizer's names."),
    Entry("megatron", "Megatron-core's dist_checkpointing, 2 ranks", "megatron_core", ("megatron-core", "torch"), environment=2, ranks=2,
          note="The moments have the names `optimizer.state.exp_avg.NAME`. Each rank writes two files, and a first moment stays exact "
               "if its second is in the other one. The save waits for a GPU in two places; the script makes these do nothing."),
    Entry("ignite", "PyTorch-Ignite's Checkpoint, `n_saved`", "ignite_checkpoint", ("pytorch-ignite",), environment=2),
    Entry("mmengine", "MMEngine's Runner, `max_keep_ckpts`", "mmengine_runner", ("mmengine",), environment=2),
    Entry("fvcore", "fvcore's PeriodicCheckpointer, `max_to_keep`", "fvcore_checkpointer", ("fvcore",), environment=2, first=-1),
    Entry("fastai", "fastai's SaveModelCallback, its own Adam", "fastai_learner", ("fastai",), environment=2, scale=EVERY, first=-1),
    Entry("timm", "timm's CheckpointSaver, `max_history`", "timm_saver", ("timm",), environment=2),
    Entry("tensorflow", "TensorFlow's CheckpointManager, `max_to_keep`", "tensorflow_manager", ("tensorflow-cpu", "keras"), environment=2,
          scale=EVERY,
          note="The index stays as it is: each quantized tensor keeps the CRC-32C that the index has of it. Indexes are small files, "
               "and stay whole."),
    Entry("orbax", "Orbax's CheckpointManager, `max_to_keep`", "jax_libraries", ("orbax-checkpoint", "jax"), "orbax", environment=2,
          note="Orbax compresses with zstd. Each save gives its files new random names, so no file has a state before it "
               "([CONTAINERS.md](CONTAINERS.md))."),
    Entry("flax", "Flax's `save_checkpoint` (msgpack), `keep`", "jax_libraries", ("flax", "jax"), "flax", environment=2,
          note="optax's Adam proves the weights. Its moments stay exact: Adamax and others have the same names for other things."),
    Entry("equinox", "Equinox's `tree_serialise_leaves`", "jax_libraries", ("equinox", "jax"), "equinox", environment=2,
          note="Arrays of numpy one after another in one file, without names. Nothing says what they hold, so they lose nothing."),
    Entry("paddle", "Paddle, `.pdparams` and `.pdopt`", "paddle_save", ("paddlepaddle",), environment=2,
          note="Both files are pickles. The optimizer in one proves the weights in the other."),
]
ENTRIES = {entry.name: entry for entry in [*ONE, *TWO]}
