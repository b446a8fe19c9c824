"""Boots guests that share a file system, and runs a command beside them. See scripts/guests.sh, which starts this in a network
namespace of its own.

    boot.py nfs|ceph COMMAND...

Guest 0 has the server of NFS, guests 1 and 2 mount the file system at /shared.
"""

import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests/real/support"))
from guests import guests  # noqa: E402

KERNEL = "linux.uml"
MODULES = ["overlay", "fuse", "loop", "nfsv4", "nfsd", "ceph", "cbc", "aes_generic", "hmac", "sha256_generic"]
# Memory in MB: a client runs two ranks that train.
MEMORY = [512, 1536, 1536]
# A guest's page is a mapping of its own on this host, and a process there is one here. Without these, processes of more than 256 MB die.
MAPPINGS = 1 << 20
# Seconds. The server frees the locks of a client that it has not heard for so long; by default 90.
LEASE = 15


def initial(base):
    """The initial file system of all guests, but for /guest."""
    root = base / "initial"
    for folder in ("bin", "modules", "proc", "sys", "dev"):
        (root / folder).mkdir(parents=True)
    shutil.copy(shutil.which("busybox"), root / "bin/busybox")
    shutil.copy(HERE / "init.sh", root / "init")
    os.chmod(root / "init", 0o755)
    # Debian keeps them in a folder that modprobe does not look into.
    [folder] = Path("/usr/lib/uml/modules").iterdir()
    version, order = folder.name, []
    (base / "modules/lib/modules").mkdir(parents=True)
    (base / "modules/lib/modules" / version).symlink_to(folder)
    for module in MODULES:
        shown = subprocess.run(["modprobe", "-d", base / "modules", "-S", version, "--show-depends", module], capture_output=True, text=True, check=True)
        order += [words[1] for words in map(str.split, shown.stdout.splitlines()) if words[0] == "insmod" and words[1] not in order]
    for path in order:
        shutil.copy(path, root / "modules")
    (root / "modules/order").write_text("".join(f"{Path(path).name}\n" for path in order))
    return root


def pack(root, to):
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    with open(to, "wb") as out:
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], input=names.encode(), cwd=root, stdout=out, check=True)


def end_with_parent():
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def link_up(name, *options):
    subprocess.run(["ip", "tuntap", "add", "dev", name, "mode", "tap"], check=True)
    if options:
        subprocess.run(["ip", *options, "dev", name], check=True)
    subprocess.run(["ip", "link", "set", name, "up"], check=True)


def boot(base, engine):
    """Starts all guests. Returns their processes."""
    root, key = initial(base), secrets.token_hex(16)
    (root / "key").write_bytes(bytes.fromhex(key))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "link", "add", "shared", "type", "bridge"], check=True)
    subprocess.run(["ip", "addr", "add", "10.78.0.254/24", "dev", "shared"], check=True)
    subprocess.run(["ip", "link", "set", "shared", "up"], check=True)
    with open(base / "disk", "wb") as file:
        file.truncate(16 << 30)
    started, said = [], []
    for number, memory in enumerate(MEMORY):
        name = f"guest{number}"
        (root / "guest").write_text(f"NAME={name}\nNUMBER={number + 1}\nPYTHON={sys.executable}\nHERE={HERE}\n")
        pack(root, base / f"{name}.cpio")
        link_up(f"host{number}", "addr", "add", f"10.77.{number + 1}.1/24")
        link_up(f"shared{number}")
        subprocess.run(["ip", "link", "set", f"shared{number}", "master", "shared"], check=True)
        nic = lambda at, device: f"vec{at}:transport=tap,ifname={device},gro=1,mac=52:54:00:00:0{at}:0{number}"
        command = [KERNEL, f"mem={memory}M", f"initrd={base}/{name}.cpio", f"umid={base.name}-{number}", f"uml_dir={base}/", "con=null", "con0=null,fd:1",
                   "ssl=null", "root=/dev/ram0", "panic=-1", nic(0, f"host{number}"), nic(1, f"shared{number}")]
        if number == 0:
            command.append(f"ubd0={base}/disk")
        with open(base / f"{name}.console", "wb") as log:
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent))
        said.append({"name": name, "engine": engine, "address": f"10.77.{number + 1}.2", "key": key, "link": f"shared{number}", "pid": started[-1].pid})
    (base / "guests.json").write_text(json.dumps(said))
    os.environ["STEPFS_GUESTS"] = str(base / "guests.json")
    return started


def serve_ceph(base, started, clients):
    """Ceph's daemons run on this host, as in scripts/ceph.sh; the clients are kernels."""
    address = "10.78.0.254"
    home, fsid = base / "ceph", str(uuid.uuid4())
    for name in ("mon", "mgr", "osd", "mds", "run", "log"):
        (home / name).mkdir(parents=True)
    settings = {
        "fsid": fsid, "mon_host": f"[v2:{address}:3300]", "public_addr": address, "cluster_addr": address, "run_dir": home / "run",
        "keyring": home / "keyring", "admin_socket": home / "run/$name.$pid.asok", "pid_file": home / "run/$name.$pid.pid",
        "crash_dir": home / "run", "log_file": home / "log/$name.log", "mon_data": home / "mon", "mgr_data": home / "mgr",
        "osd_data": home / "osd", "mds_data": home / "mds", "osd_pool_default_size": 1, "osd_pool_default_min_size": 1,
        "osd_pool_default_pg_num": 8, "osd_pool_default_pg_autoscale_mode": "off", "osd_crush_chooseleaf_type": 0,
        "mon_allow_pool_size_one": "true", "osd_objectstore": "bluestore", "bluestore_block_size": 6 << 30, "osd_memory_target": 1 << 30,
        "mgr_initial_modules": "",
    }
    (home / "ceph.conf").write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    environment = {**os.environ, "CEPH_CONF": str(home / "ceph.conf")}

    def run(*words, check=True):
        done = subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True, timeout=120)
        if check and done.returncode:
            raise RuntimeError(f"{words}: {done.stdout}{done.stderr}")
        return done.stdout

    def daemon(*words):
        with open(home / f"log/{words[0]}.out", "wb") as log:
            started.append(subprocess.Popen([*map(str, words), "-f"], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            start_new_session=True, preexec_fn=end_with_parent))

    def wait(what, *words):
        end = time.monotonic() + 120
        while what not in run(*words, check=False):
            if time.monotonic() > end:
                raise TimeoutError(f"{words} does not show {what}")
            time.sleep(.3)

    (home / "keyring").touch(0o600)
    for name in ("mon.", "client.admin", "mgr.a", "osd.0", "mds.a"):
        run("ceph-authtool", home / "keyring", "--gen-key", "-n", name, *(word for part in ("mon", "osd", "mds", "mgr") for word in ("--cap", part, "allow *")))
    run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:{address}:3300]", home / "monmap")
    run("ceph-mon", "-i", "a", "--mkfs", "--monmap", home / "monmap", "--keyring", home / "keyring")
    daemon("ceph-mon", "-i", "a")
    wait("quorum", "timeout", 20, "ceph", "mon", "stat")
    daemon("ceph-mgr", "-i", "a")
    osd = uuid.uuid4()
    run("ceph", "osd", "new", osd)
    run("ceph-osd", "-i", 0, "--mkfs", "--osd-uuid", osd)
    daemon("ceph-osd", "-i", 0)
    for pool in ("files.data", "files.meta"):
        run("ceph", "osd", "pool", "create", pool)
    run("ceph", "fs", "new", "files", "files.meta", "files.data")
    for name in ("session_timeout", "session_autoclose"):
        # The least that it takes.
        run("ceph", "fs", "set", "files", name, 30)
    daemon("ceph-mds", "-i", "a")
    wait("up:active", "ceph", "mds", "stat")
    secret = run("ceph-authtool", "-p", "-n", "client.admin", home / "keyring").strip()
    for client in clients:
        options = f"name=admin,secret={secret},ms_mode=crc"
        for attempt in range(5):
            # Until the daemon of the metadata has told the monitor that it is there.
            done = client.run("mount", "-i", "-t", "ceph", "-o", options, f"{address}:3300:/", "/shared", check=attempt == 4, patience=120)
            if done.returncode == 0:
                break
            time.sleep(2)


def serve_nfs(server, clients):
    """knfsd exports an ext4."""
    server.run("bash", "-euxc", f"""
        mkfs.ext4 -q -E lazy_itable_init=1 /dev/ubda
        mount -o barrier=0 /dev/ubda /shared
        chmod 1777 /shared
        mount -t nfsd nfsd /proc/fs/nfsd
        mkdir -p /run/rpc_pipefs /var/lib/nfs/v4recovery
        touch /var/lib/nfs/etab /var/lib/nfs/rmtab
        mount -t tmpfs nfs /var/lib/nfs && mkdir -p /var/lib/nfs/v4recovery && touch /var/lib/nfs/etab /var/lib/nfs/rmtab
        echo {LEASE} >/proc/fs/nfsd/nfsv4leasetime
        echo {LEASE} >/proc/fs/nfsd/nfsv4gracetime
        echo '/shared 10.78.0.0/24(rw,fsid=0,no_root_squash,no_subtree_check,sync)' >/run/exports
        cat /run/exports >/etc/exports
        exportfs -a
        rpc.mountd -N 3
        rpc.nfsd -N 3 8""", patience=60)
    for client in clients:
        client.run("mount", "-t", "nfs4", "-o", "vers=4.2,proto=tcp,sec=sys", "10.78.0.1:/", "/shared", patience=120)


def say_consoles(base):
    for path in sorted(base.glob("*.console")):
        print(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}", file=sys.stderr)


def main():
    engine, command = sys.argv[1], sys.argv[2:]
    base = Path(tempfile.mkdtemp(prefix="stepfs-guests-"))
    started, mappings = [], Path("/proc/sys/vm/max_map_count")
    # The host's own number; that of the first of several runs at once. The last one puts it back.
    others = lambda: [path for path in base.parent.glob("stepfs-guests-*/mappings") if path.parent != base]
    before = min(int(path.read_text()) for path in [mappings, *others()])
    (base / "mappings").write_text(str(before))
    mappings.write_text(str(max(MAPPINGS, before)))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        began = time.monotonic()
        started = boot(base, engine)
        server, *clients = every = guests()
        for guest in every:
            guest.await_agent(90)
        for guest in every:
            guest.call("os.environ.update", {name: value for name, value in os.environ.items() if re.match("STEPFS_(?!GUESTS)", name)})
        print(f"booted in {time.monotonic() - began:.0f} s: {base}", file=sys.stderr, flush=True)
        if engine == "nfs":
            serve_nfs(server, clients)
        else:
            serve_ceph(base, started, clients)
        print(f"{engine} is mounted after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        code = subprocess.run(command).returncode
        if code:
            say_consoles(base)
        sys.exit(code)
    except (AssertionError, RuntimeError, TimeoutError) as error:
        print(error, file=sys.stderr)
        say_consoles(base)
        sys.exit(1)
    finally:
        for one in started:
            # Each has processes of its own for the programs of the guest, in its session.
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()
        shutil.rmtree(base)
        if not others():
            mappings.write_text(str(before))


if __name__ == "__main__":
    main()
