"""ElasticDL's own client on a mount; run by test_elasticdl.py with the Python of STEPFS_ELASTICDL_PYTHON (3.8), which
scripts/clients.sh makes:

    pip install --pre --no-deps elasticdl==0.2.0rc3
    pip install 'tensorflow-cpu==2.5.3' 'protobuf<3.21' odps pyodps

Two servers save into CHECKPOINT_DIR; after `stepfs sync` all versions are restored to three servers, resharded, and restored
again. Arguments: the stepfs binary, the mount, the store, a directory for resharded versions.
"""

import os
import subprocess
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
from elasticdl.python.common.hash_utils import int_to_id, string_to_id
from elasticdl.python.common.save_utils import CheckpointSaver
from elasticdl.python.ps.embedding_table import EmbeddingTable
from elasticdl.python.ps.parameters import Parameters

SERVERS, VERSIONS, IDS, DIM = 2, (10, 20, 30, 40), 5000, 16
SHAPES = {"dense/kernel": (64, 128), "dense/bias": (128,), "out/kernel": (128, 64), "out/bias": (64,)}


def train(rng):
    """(version, variables, ids, rows), as in training."""
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    dense = {name: 0.1 * normal(*shape) for name, shape in SHAPES.items()}
    ids, rows = rng.permutation(4 * IDS)[:IDS], 0.1 * normal(IDS, DIM)
    for version in VERSIONS:
        dense = {name: values + np.float32(1e-3) * normal(*values.shape) for name, values in dense.items()}
        rows[rng.permutation(IDS)[:IDS // 5]] += np.float32(3e-3) * normal(IDS // 5, DIM)
        yield version, dense, ids, rows.copy()


def save(saver, server, version, dense, ids, rows, rng):
    own = Parameters()
    own.version = version
    own.non_embedding_params = {n: tf.Variable(v) for n, v in dense.items() if string_to_id(n, SERVERS) == server}
    mine = [at for at in rng.permutation(len(ids)) if int_to_id(int(ids[at]), SERVERS) == server]
    for name in ("emb", "never_used"):
        own.embedding_params[name] = EmbeddingTable(name, DIM, "uniform")
    own.embedding_params["emb"].set([int(ids[at]) for at in mine], [rows[at] for at in mine])
    saver.save(version, own.to_model_pb(), False, server, SERVERS)


def restore(folder, servers):
    """Version, variables and rows of all servers together."""
    versions, dense, rows = set(), {}, {}
    for server in range(servers):
        own = CheckpointSaver.restore_params_from_checkpoint(folder, server, servers)
        versions.add(own.version)
        dense.update({name: variable.numpy().tobytes() for name, variable in own.non_embedding_params.items()})
        rows.update({int(i): np.asarray(row).tobytes() for i, row in own.embedding_params["emb"].embedding_vectors.items()})
    (version,) = versions
    return version, dense, rows


def main(stepfs, mount, store, target):
    run = lambda *words: subprocess.run([stepfs, *map(str, words)], check=True, stdout=subprocess.PIPE)
    rng = np.random.default_rng(1)
    directory = os.path.join(mount, "ckpt")
    savers = [CheckpointSaver(directory, 10, 0, False) for _ in range(SERVERS)]
    for state in train(rng):
        for server in range(SERVERS):
            save(savers[server], server, *state, rng)
    run("sync", mount)
    newest = CheckpointSaver.get_valid_lastest_version_dir(directory)
    assert newest == os.path.join(directory, "version-40"), newest
    for version in VERSIONS:
        expected = restore(os.path.join(directory, "version-%d" % version), 3)
        assert expected[0] == version and len(expected[1]) == len(SHAPES) and len(expected[2]) == IDS
        for servers in (1, 2, 3, 7):
            folder = os.path.join(target, "%d-for-%d" % (version, servers))
            run("reshard", "%s:ckpt/version-%d" % (store, version), servers, folder)
            assert CheckpointSaver.check_checkpoint_valid(folder)
            assert restore(folder, servers) == expected
    # The last state is still in memory: the newest version is exact.
    assert expected[1] == {name: values.tobytes() for name, values in state[1].items()}
    assert expected[2] == {int(i): row.tobytes() for i, row in zip(state[2], state[3])}


if __name__ == "__main__":
    main(*sys.argv[1:])
