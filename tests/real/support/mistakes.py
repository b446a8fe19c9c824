"""The catalogue of mistakes: how each message comes about, and that its next step works.

`test_errors.py` runs every entry in a new directory, as a user types it. `scripts/errors.py` compares the entries with the messages in
the source, and writes docs/ERRORS.md.
"""

import re
from dataclasses import dataclass
from functools import cache

FAILED, USAGE, DAMAGED = 1, 2, 3


@dataclass
class Mistake:
    """All but `when` are lines of bash, or patterns of messages in which `*` stands for any text.

    `then` is the next step that the message names. It has the texts of the stars as $1, $2, ... and must succeed. `needs` names things
    that are ready: `st`, a store with three released files and a newest one below run/; `run` and `tiny`, checkpoints as plain files;
    `mir`, the mirror of such a store; `mirrored`, that store; `edl`, a checkpoint of ElasticDL; `M`, a mount of such a store, shared with other entries; `root`.
    """

    when: str
    make: str
    run: str
    says: object
    then: str
    code: int = FAILED
    needs: str = ""

    @property
    def patterns(self):
        return [self.says] if isinstance(self.says, str) else self.says


@cache
def pattern(text):
    """The regular expression of a message; a star at its begin or end is one word."""
    parts = [re.escape(part) for part in text.split("*")]
    stars = ["(.+?)"] * (len(parts) - 1) + [""]
    for place, side in ((0, parts[0]), (-2, parts[-1])):
        if len(parts) > 1 and not side:
            stars[place] = r"(\S+)"
    return re.compile("".join(part + star for part, star in zip(parts, stars)), re.DOTALL)


# Another user, and a process that has the store without a mount.
NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups"
HOLD = ("python3 -c 'import fcntl,struct,time; f=open(\"st/lock\",\"r+\"); fcntl.fcntl(f,37,struct.pack(\"hhqqi\",1,0,0,0,0)); "
        "open(\"held\",\"w\"); time.sleep(3)' > /dev/null 2>&1 & while [ ! -e held ]; do sleep .05; done")
URL = "file://$PWD/mir"
LIES = "* lies inside the store *; name the store, or a path in its mount"
IS_URL = "it is a URL; name a path of this machine. `stepfs pull` makes a store of a mirror"
NOT_THERE = "* is not in *; `stepfs ls *` shows its files"
IN_USE = "* is in use by *, and a store serves one process at a time"
AT = "; it is mounted at *: work there, or first `stepfs umount *`"
A_STORE = ["* is a store; *", "this needs its daemon: `stepfs mount * DIR`, then name DIR"]
# Writes into the middle of the largest object.
DAMAGE = ("o=$(find {}/objects -type f -printf '%s %p\\n' | sort -n | tail -1 | cut -d\" \" -f2); chmod 600 $o; "
          "head -c 64 /dev/zero | dd of=$o bs=1 seek=$(($(stat -c %s $o) / 2)) conv=notrunc status=none")
TUNED = "stepfs tune run/step_1.pt run/step_2.pt --near inshrinkerator-12bins --eval 'echo 1 #'"
EXISTS = "* exists already; name another place, or replace it with --force"


def setting(when, line, says, code=FAILED):
    """A wrong line at the end of the settings; without it the store is fine again."""
    return Mistake(when, f"cp st/stepfs.toml good; printf '{line}' >> st/stepfs.toml", "stepfs ls st", says,
                   "cp good st/stepfs.toml; stepfs ls st", code, "st")


def option(when, words, says, then):
    return Mistake(when, "", f"stepfs mount st m {words}", says, f"stepfs mount st m {then}", USAGE, "st")


MISTAKES = [
    # --- shared stores
    Mistake("a shared store on a file system without what it needs", "mkdir t; mount -t tmpfs tmpfs t", "stepfs mount --shared t/sh m",
            "* lies on *, and a store there cannot be shared: *; docs/MACHINES.md names the file systems that can",
            "umount t; stepfs mount --shared sh m", needs="root"),
    Mistake("a daemon on another machine, whose lock is not seen here",
            "stepfs mount --shared sh m; stepfs umount m; mkdir sh/daemons/else; touch sh/daemons/else/lock; "
            "(for i in $(seq 100); do touch sh/daemons/else/lock; sleep .1; done) > /dev/null 2>&1 &",
            "stepfs mount sh m",
            "*: the daemon of * works, and its lock is free here: this file system's locks hold on one machine only, so the store cannot be "
            "shared; mount the file system with locks for all machines (NFS: without nolock or local_lock; Lustre: -o flock)",
            "until stepfs mount sh m; do sleep 1; done"),
    Mistake("an existing store is to become a shared one", "", "stepfs mount --shared st m",
            "* is a store of one daemon at a time; --shared makes a new store: name a new directory, and `stepfs export * . DIR` copies the "
            "files", "stepfs export st . copy; stepfs mount --shared sh m", needs="st"),
    Mistake("a mirror of a shared store", "stepfs mount --shared sh m; stepfs umount m", f"stepfs mount sh m --mirror {URL}",
            "* is a shared store, which cannot have a mirror yet; leave out --mirror", "stepfs mount sh m"),
    Mistake("a profile for a shared store, at a mount", "stepfs mount --shared sh m; stepfs umount m", "stepfs mount sh m --profile exact",
            "* is a shared store; write default_profile in */stepfs.toml while no daemon serves it",
            "sed -i 's/^default_profile.*/default_profile = \"exact\"/' $2/stepfs.toml; stepfs mount sh m"),
    Mistake("the trash of a shared store", "stepfs mount --shared sh m; stepfs umount m; cp sh/stepfs.toml good; "
            "sed -i 's/^# trash_for/trash_for/' sh/stepfs.toml", "stepfs mount sh m",
            "* does not work with `shared = true` yet; leave one of them out", "cp good sh/stepfs.toml; stepfs mount sh m"),
    Mistake("work for the keeper, on another mount", "stepfs mount --shared sh m1; until stepfs status m1 | grep -q keeper$; do sleep .1; done; "
            "stepfs mount sh m2", "stepfs release m2", "* is only *; the keeper's mount does this", "stepfs release m1"),
    # --- mount
    Mistake("the directory above the store is missing", "", "stepfs mount none/deep/st m",
            "* does not exist, so the store cannot be created in it; mkdir -p *", "mkdir -p $2; stepfs mount none/deep/st m"),
    Mistake("the store is a file", "touch f", "stepfs mount f m", "* is a file; a store is a directory, and stepfs creates it",
            "stepfs mount st m"),
    Mistake("the store's directory has other files", "mkdir full; touch full/a", "stepfs mount full m",
            "* is not a stepfs store and not empty; name an empty or new directory to create one", "stepfs mount new m"),
    Mistake("the mount point is a file", "touch f", "stepfs mount st f", "* is a file; name a directory to mount the store on",
            "stepfs mount st m"),
    Mistake("store and mount point in the wrong order", "mkdir ckpts", "stepfs mount ckpts st",
            "* is a store, and * is none; the store comes first: stepfs mount * *", "[ -z \"$(ls ckpts)\" ]; stepfs mount $3 $4",
            needs="st"),
    Mistake("two stores, and no mount point", "cp -a st st2", "stepfs mount st2 st", "* is a store; name another directory to mount * on",
            "stepfs mount $2 m", needs="st"),
    Mistake("a new store inside a store", "", "stepfs mount st/tree/new m", LIES, "stepfs mount $2 m", needs="st"),
    Mistake("a new store inside a mount", "", "stepfs mount $M/new m",
            "* lies in the stepfs mount *; a store belongs on a disk, so name a directory outside", "stepfs mount new m", needs="M"),
    Mistake("the mount point is inside the store", "", "stepfs mount st st/tree/run",
            "* is inside the store; name a directory outside it", "stepfs mount st m", needs="st"),
    Mistake("the mount point is the store's parent", "", "stepfs mount st .",
            "* and the store * lie in one another; mount it somewhere else", "stepfs mount st m", needs="st"),
    Mistake("the store is mounted at another place", "stepfs mount st m", "stepfs mount st m2", [IN_USE, AT],
            "stepfs umount $4; stepfs mount st m2", needs="st"),
    Mistake("the store is mounted there already", "stepfs mount st m", "stepfs mount st m",
            "stepfs: * is already mounted at *, and keeps its options; for others, first `stepfs umount *`",
            "stepfs umount ${3%\\`}; stepfs mount -o ro st m", 0, "st"),
    Mistake("the store is mounted there already, without the mirror", "stepfs mount st m", "stepfs mount st m --mirror file://$PWD/new",
            "* is already mounted at *, without this mirror; first `stepfs umount *`",
            "stepfs umount $3; stepfs mount st m --mirror file://$PWD/new", needs="st"),
    Mistake("the store is mounted there already, with another profile", "stepfs mount st m", "stepfs mount st m --profile exact",
            "* is already mounted at *, with default_profile = *; first `stepfs umount *`",
            "stepfs umount ${4%\\`}; stepfs mount st m --profile exact", needs="st"),
    Mistake("another store is mounted there", "stepfs mount st m", "stepfs mount new m",
            "the store * is mounted at * already; unmount it first (stepfs umount *)", "stepfs umount ${3%)}; stepfs mount new m",
            needs="st"),
    Mistake("another command works on the store", HOLD, "stepfs gc st", [IN_USE, "; try again when that has ended"],
            "while ! stepfs gc st; do sleep .2; done", needs="st"),
    Mistake("a mount while another command works on the store", HOLD, "stepfs mount st m",
            "stepfs: waiting for process *, which still works on * (at most * s)", "ls m/run", 0, "st"),
    Mistake("the mount point has files of its own", "mkdir m; touch m/a", "stepfs mount st m",
            "stepfs: * has * of its own, which the mount hides until `stepfs umount *`; `stepfs import STORE *` brings files into an "
            "unmounted store", "stepfs umount $3; stepfs import st m/*; stepfs ls st | grep a", 0, "st"),
    Mistake("the daemon was killed, and the shell stands in the dead mount", "stepfs mount st m",
            "cd m; kill -9 $(cat ../st/lock); sleep .5; stepfs mount ../st .",
            "stepfs: your shell stands in the former mount; `*` enters the new one", "cd m; eval \"$1\"; ls run", 0, "st"),
    Mistake("the daemon was killed", "stepfs mount st m; kill -9 $(cat st/lock); sleep .5", "stepfs ls m",
            "the daemon of the mount * is gone; start it again: stepfs mount * *", "stepfs mount $2 $3; stepfs ls m", needs="st"),
    Mistake("stepfs.toml of a mounted store was removed", "stepfs mount st m; mv st/stepfs.toml x", "stepfs ls m",
            "the store of the mount * is not at *: it was moved or removed, or this container lacks it; bring it there, or `stepfs umount *` "
            "and mount it from its new place", "mv x st/stepfs.toml; stepfs ls m", needs="st"),
    Mistake("a store that others may replace, for others", "mkdir open; chmod 777 open", "stepfs mount --allow-other open/st m",
            "another user may change *, and so replace the store; give it to the user who mounts (chown, chmod go-w) before you let others "
            "in with --allow-other", "chmod go-w $1; stepfs mount --allow-other open/st m"),
    Mistake("root without the right to mount", "", "setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin stepfs mount st m",
            "the system refused: *; `stepfs doctor` says what is missing",
            "(setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin stepfs doctor || true) | grep -- '--cap-add SYS_ADMIN'",
            needs="st root"),
    Mistake("a mount without privileges and without fusermount3", "",
            "setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin env FUSERMOUNT_PATH=/nowhere stepfs mount st m",
            "a mount without CAP_SYS_ADMIN needs fusermount3, which is missing: apt-get install fuse3", "stepfs mount st m", needs="st root"),
    Mistake("a user who does not exist", "", "stepfs mount -o user=nobodyhere st m", "user=*: there is no such user",
            "stepfs mount -o user=$(id -un) st m", needs="st"),
    Mistake("a mount for another user, without root", "chmod 777 .; mkdir m", f"{NOBODY} stepfs mount -o user=daemon st m",
            "user=*: only root can mount for another user", "stepfs mount -o user=root st m", needs="st root"),
    option("an option without its value", "-o profile", "option * takes a value: *=*", "-o $2=$3"),
    option("an option with a value that it does not have", "-o allow_other=1", "option * takes no value", "-o ro"),
    option("an unknown option", "-o alow_other", "unknown option *; stepfs has allow_other,", "-o ro"),
    option("options of a mount are to change", "-o remount,ro",
           "option remount: stepfs cannot change a mount; unmount it and mount it again with the new options", "-o ro"),
    option("a misspelled profile", "--profile ballanced",
           "no profile is named \"*\"; write exact, balanced or compact (`stepfs help profile` has more)", "--profile balanced"),
    option("a size in words", "--memory lots", "write a size such as 512M or 2G", "--memory 512M"),
    option("a size with another unit", "--memory 2X", "* is not a unit; write K, M, G or T", "--memory 2G"),
    Mistake("mount(8), and a missing mount point", "", "stepfs mount.stepfs st m",
            "the mount point * is not a directory; create it with: mkdir -p *", "mkdir -p $2; stepfs mount.stepfs st m", 32, "st"),
    Mistake("mount(8), and a missing store", "mkdir m", "stepfs mount.stepfs st m",
            "there is no stepfs store at *; check the path, or create one: stepfs mount * DIR", "stepfs mount $2 m", 32),
    # --- URLs
    Mistake("a mirror where a store is wanted", "", "stepfs mount s3://bucket/run m", IS_URL,
            "stepfs pull file://$PWD/mir new; stepfs mount new m", USAGE, "mir"),
    Mistake("a mirror where a mount is wanted", "", f"stepfs sync {URL}", IS_URL, f"stepfs pull {URL} new", needs="mir"),
    Mistake("a mirror without a scheme", "", "stepfs mount st m --mirror bucket/run",
            "*: a mirror is file:///DIRECTORY or s3://BUCKET/PREFIX", f"stepfs mount st m --mirror file://$PWD/new", needs="st"),
    Mistake("a mirror with a relative directory", "", "stepfs mount st m --mirror file://new", "*: write file:/// and an absolute path",
            "stepfs mount st m --mirror file:///$PWD/new", needs="st"),
    Mistake("a bucket without a prefix", "", "stepfs pull s3://bucket new", "*: write s3://BUCKET/PREFIX", f"stepfs pull {URL} new",
            needs="mir"),
    Mistake("a prefix that servers list in another way", "", "stepfs pull 's3://bucket/run[1]' new",
            "*: use letters, digits and -_.!&$=;:+,() between single slashes in a mirror's URL", f"stepfs pull {URL} new", needs="mir"),
    Mistake("a URL with credentials", "", "stepfs pull s3://key:secret@bucket/run new",
            "credentials and options do not belong into a mirror's URL; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            f"AWS_ACCESS_KEY_ID=key stepfs pull {URL} new", needs="mir"),
    Mistake("a mirror inside its store", "", "stepfs mount st m --mirror file://$PWD/st/mir",
            "the mirror * and * * are in one another; use a directory of its own", "stepfs mount st m --mirror file://$PWD/own",
            needs="st"),
    Mistake("the mirror of another store", "", f"stepfs mount new m --mirror {URL}",
            "it is the mirror of another store, *: use another name; if that store is gone for good, delete the mirror's * and mount this "
            "one with --mirror again", f"rm mir/$2; stepfs mount new m --mirror {URL}", needs="mir"),
    Mistake("a second mirror of a store", f"stepfs mount st m --mirror {URL}; stepfs umount m",
            "stepfs mount st m --mirror file://$PWD/other", "the store's mirror is *; change `url` in [mirror] there",
            "sed -i \"s|^url.*|url = \\\"file://$PWD/other\\\"|\" st/stepfs.toml; stepfs mount st m", needs="st"),
    Mistake("a directory that is no mirror", "mkdir d", "stepfs ls file://$PWD/d",
            "it is no mirror of stepfs, or has no state of a store; is the URL right?", f"stepfs ls {URL}", needs="mir"),
    Mistake("a mirror of a later version", "sed -i 's/format = 1/format = 9/' mir/stepfs-mirror", f"stepfs ls {URL}",
            "it has format *, and this stepfs reads format *", f"sed -i 's/format = 9/format = 1/' mir/stepfs-mirror; stepfs ls {URL}",
            needs="mir"),
    Mistake("a mark that was overwritten", "cp mir/stepfs-mirror good; echo x > mir/stepfs-mirror", f"stepfs ls {URL}",
            "* is no mark of stepfs", f"cp good mir/stepfs-mirror; stepfs ls {URL}", needs="mir"),
    Mistake("a mark without its store", "cp mir/stepfs-mirror good; sed -i 's/store = .*/store = \"x\"/' mir/stepfs-mirror",
            f"stepfs ls {URL}", "* names no store", f"cp good mir/stepfs-mirror; stepfs ls {URL}", needs="mir"),
    Mistake("a mirror of another user", "chmod 755 .; chmod 700 mir", f"{NOBODY} stepfs ls {URL}",
            "*: this user may not read and write there: *", f"chmod 755 mir; {NOBODY} stepfs ls {URL}", needs="mir root"),
    Mistake("a time before the mirror's first state", "", f"stepfs ls --at 300d {URL}",
            "it has no state of that time, but * later ones; `stepfs status` of this URL lists them",
            f"stepfs ls $(stepfs status {URL} | grep -o -- '--at.*' | tail -1) {URL}", needs="mir"),
    Mistake("a time in words", "", f"stepfs ls --at yesterday {URL}", "write an age such as 3h or 2d, or @ and seconds since 1970",
            f"stepfs ls --at @$(date +%s) {URL}", USAGE, "mir"),
    Mistake("a store and a URL at once", "", f"stepfs ls st {URL}", "*: name the URL of a mirror alone", f"stepfs ls {URL}",
            needs="st mir"),
    Mistake("a store as it was", "", "stepfs ls --at 3h st", "--at belongs to the URL of a mirror; leave it out for *", "stepfs ls $1",
            needs="st"),
    Mistake("repair of a mirror", "", f"stepfs verify --repair {URL}", "a mirror mends itself while its store is mounted; name a store",
            "stepfs verify --repair st", needs="st mir"),
    Mistake("a time for a store", "", "stepfs verify st --at 1h", "--at is for the URL of a mirror; leave it out",
            "stepfs verify st", needs="st"),
    # --- umount, sync and paths
    Mistake("no mount is there", "mkdir m", "stepfs umount m", "no stepfs is mounted at *; `stepfs status` lists the mounts",
            "stepfs status | grep $M", needs="M"),
    Mistake("a program is in the mount", "stepfs mount st m; (cd m; exec sleep 30) > /dev/null 2>&1 & sleep .2", "stepfs umount m",
            "* is in use by *; end them or make them leave it, and try again; `stepfs umount --force *` cuts them off",
            "stepfs umount --force $3", needs="st"),
    Mistake("the mount of another user is unmounted", "chmod 755 .; stepfs mount st m", f"{NOBODY} stepfs umount m",
            "* belongs to user *; only that user and root may unmount it", "stepfs umount $1", needs="st root"),
    Mistake("another user asks about a mount", "", f"{NOBODY} stepfs ls $M",
            "the mount * belongs to *, and no other user may enter it; work as that user, or mount it with --allow-other", "stepfs ls $M",
            needs="M root"),
    Mistake("another user asks about a mount that lets others in", "chmod 755 .; stepfs mount --allow-other st m", f"{NOBODY} stepfs ls m",
            "the mount * belongs to *; only that user and root may ask stepfs about it, but you may use its files", f"{NOBODY} ls $1",
            needs="st root"),
    Mistake("a store that is not mounted, where a mount is wanted", "", "stepfs sync st", A_STORE, "stepfs mount $3 m; stepfs sync m",
            needs="st"),
    Mistake("a store that is mounted, where its mount is wanted", "", "stepfs latest $S",
            ["* is a store; *", "name its mount *, or a path below *"], "stepfs latest ${3}", needs="M"),
    Mistake("a path outside of any mount", "mkdir d", "stepfs ls d",
            "* is neither a stepfs store nor in a stepfs mount; `stepfs status` lists the mounts", "stepfs status $M | grep $M", needs="M"),
    Mistake("a file in the store's own directory", "", "stepfs pin $S/tree/run/step_1.pt", [LIES, "in its mount: *"],
            "stepfs pin $3; stepfs unpin $3", needs="M"),
    Mistake("a mount without a mirror", "stepfs mount st m", "stepfs sync --mirror m",
            "* is mounted without a mirror (`stepfs mount --mirror URL`)",
            "stepfs umount m; stepfs mount st m --mirror file://$PWD/new; stepfs sync --mirror m", needs="st"),
    Mistake("a mirror on a disk that is not mounted", "", "stepfs mount st m --mirror file://$PWD/disk/mir",
            "* does not exist, so * cannot be made in it; mount its disk, or mkdir -p *",
            "mkdir -p $3; stepfs mount st m --mirror file://$PWD/disk/mir", needs="st"),
    # --- ls, latest, best
    Mistake("no checkpoint yet", "mkdir -p $M/empty", "stepfs latest $M/empty", "no whole checkpoint is below *; `stepfs ls *` shows all",
            "stepfs ls $2", needs="M"),
    Mistake("the run names no best checkpoint", "", "stepfs best $M/run",
            "nothing below * names a checkpoint as the best of its run; `stepfs latest *` names the newest", "stepfs latest $2", needs="M"),
    Mistake("two runs, each with a best checkpoint",
            "mkdir -p $M/two/a $M/two/b; for r in a b; do for n in 1 2; do cp run/step_$n.pt $M/two/$r/epoch=$n-val_loss=0.$n.ckpt; done; "
            "done; stepfs sync $M", "stepfs best $M/two", "several are named as the best: *; name the directory of one run",
            "stepfs best $M/two/a", needs="M run"),
    Mistake("the newest checkpoint was cut short",
            "mkdir $M/cut; cp run/step_1.pt $M/cut; sleep .1; head -c 200000 run/step_2.pt > $M/cut/step_2.pt; stepfs sync $M",
            "stepfs latest $M/cut", "stepfs: newer, but not whole*", "stepfs ls $M/cut | grep 'CUT SHORT'", 0, "M run"),
    Mistake("arrays of an evaluation are newer than the training state",
            "mkdir -p $M/arrays; cp run/step_1.pt $M/arrays; $PYTHON -c 'import numpy; numpy.save(\"e.npy\", numpy.ones(9))'; cp e.npy $M/arrays; "
            "stepfs sync $M", "stepfs latest $M/arrays", "stepfs: newer, but without *: *", "stepfs inspect $M/$2", 0, "M run"),
    # --- export, cat, import
    Mistake("a path with the mount's root before it", "", "stepfs export st /run/step_1.pt out",
            "* is not inside *; paths are relative to it, without a leading `/`: `stepfs ls *` shows them",
            "stepfs export st run/step_1.pt out", needs="st"),
    Mistake("a path that is not in the store", "", "stepfs export st run/step_9.pt out", NOT_THERE, "stepfs ls $3", needs="st"),
    Mistake("a path that is not on the mirror", "", f"stepfs cat {URL} run/step_9.pt", NOT_THERE, "stepfs ls $3", needs="mir"),
    Mistake("a directory where a file is wanted", "", "stepfs cat st run", "* is a directory in *; `stepfs export * * DEST` copies it",
            "stepfs export $3 $4 out", needs="st"),
    Mistake("the destination's directory is missing", "", "stepfs export st run/step_1.pt none/out", "* does not exist; mkdir -p *",
            "mkdir -p $2; stepfs export st run/step_1.pt none/out", needs="st"),
    Mistake("the destination exists", "touch out", "stepfs export st run/step_1.pt out", EXISTS,
            "stepfs export --force st run/step_1.pt out", needs="st"),
    Mistake("a directory has the name of an unfinished copy", "mkdir out.stepfs-export", "stepfs export st run/step_1.pt out",
            "* is in the way", "rmdir $1; stepfs export st run/step_1.pt out", needs="st"),
    Mistake("salvage of a file that is as it was written", "", "stepfs export --salvage st run/step_4.pt out",
            "* is not released: copy the file itself", "stepfs export st run/step_4.pt out", needs="st"),
    Mistake("a directory outside of the store for an import", "", "stepfs import --to ../x st run",
            "--to *: name a directory inside the store, without `..`", "stepfs import --to x st run", needs="st run"),
    Mistake("an import into a mount", "", "stepfs import $M run", "* is in a mount of *; copy the files there with `cp -a`",
            "mkdir $1/copied; cp -a run $1/copied", needs="M run"),
    Mistake("an import of everything", "", "stepfs import st /", "* has no file name; name a file or a directory",
            "stepfs import --to x st run", needs="st run"),
    Mistake("an import of a device", "mkfifo pipe", "stepfs import st pipe", "* is neither a file nor a directory",
            "stepfs import --to x st run", needs="st run"),
    Mistake("an import of another file of the same name", "cp run/step_2.pt run/step_1.pt", "stepfs import st run",
            "the store already has another *, and nothing was copied from *; import into another directory with `--to DIR`, or remove it "
            "in a mount first", "stepfs import --to x st run", needs="st run"),
    # --- verify
    Mistake("a path in a mount is verified", "", "stepfs verify $M/run",
            "* is a path in a mount; stepfs verifies whole stores: `stepfs verify *`", "stepfs verify ${2%\\`}", needs="M"),
    Mistake("a store that does not exist", "", "stepfs verify none",
            "there is no stepfs store at *; check the path, or create one: stepfs mount * DIR", "stepfs mount $2 m; stepfs verify $2"),
    Mistake("a manifest in another form", "md5sum run/* > sums", "stepfs verify st --against sums",
            "line * is not in sha256sum's format: 64 hexadecimal digits, two blanks, a name",
            "sha256sum run/* > sums; stepfs verify st --against sums", needs="st run"),
    Mistake("an empty manifest", "touch sums", "stepfs verify st --against sums", "it names no file; make a manifest with sha256sum",
            "sha256sum run/* > sums; stepfs verify st --against sums", needs="st run"),
    # --- pull
    Mistake("pull in the wrong order", "", f"stepfs pull new {URL}", "*: write the URL of a mirror first, then the store",
            f"stepfs pull {URL} $1; stepfs ls new", needs="mir"),
    Mistake("a path that the mirror does not have, for pull", "", f"stepfs pull {URL} new none",
            "* is not on *; `stepfs ls *` shows its files", "stepfs ls $3", needs="mir"),
    Mistake("a pull into a store with other files",
            "stepfs import other run/step_2.pt; mkdir x; cp run/step_2.pt x/step_1.pt; stepfs import --to run other x/step_1.pt",
            f"stepfs pull {URL} other", "another file of this store has its place", f"stepfs pull {URL} new", DAMAGED, "mir run"),
    # --- gc, pin, profile, release, recall
    Mistake("a dry run of a store that is mounted", "", "stepfs gc --dry-run $S", [IN_USE, AT], "stepfs gc --dry-run ${3}", needs="M"),
    Mistake("unpin of a directory without a pin", "", "stepfs unpin $M/run", "* is not pinned", "stepfs pin $1; stepfs unpin $1",
            needs="M"),
    Mistake("unpin of a file below a pinned directory", "mkdir $M/pinned; cp run/step_1.pt $M/pinned; stepfs pin $M/pinned",
            "stepfs unpin $M/pinned/step_1.pt", "* has no pin of its own; unpin *, which pins all files below it", "stepfs unpin $2",
            needs="M run"),
    Mistake("a pin of a pipe", "mkdir $M/pipes; mkfifo $M/pipes/p", "stepfs pin $M/pipes/p",
            "only files and directories can *", "stepfs pin $M/pipes", needs="M"),
    Mistake("a pin of a file that is lossy already", "", "stepfs pin $M/run/step_1.pt", "stepfs: * is *",
            "stepfs unpin $M/run/step_1.pt", 0, "M"),
    Mistake("a pin of a directory with such files", "", "stepfs pin $M/run", "stepfs: * of * files in *: *", "stepfs unpin $M/run", 0, "M"),
    Mistake("no profile to unset", "", "stepfs profile --unset $M/run",
            "*: it has no profile of its own; a directory above it or a rule decides: `stepfs profile *`", "stepfs profile ${2%\\`}",
            needs="M"),
    Mistake("the newest file is to be released", "", "stepfs release $M/run/step_4.pt", "stepfs: * stays as it is: *",
            "stepfs why $M/run/step_4.pt", needs="M"),
    # --- report
    Mistake("a report of a file", "", "stepfs report run/step_1.pt -o new.html", "* is a file; name the directory of a run",
            "stepfs report run -o new.html", needs="run"),
    Mistake("a report of an empty directory", "mkdir empty", "stepfs report empty -o new.html",
            "no checkpoint is below *: no file there has tensors; name the directory that a run saves to",
            "stepfs report run -o new.html", needs="run"),
    # --- diff, merge
    Mistake("a merge over a file", "",
            "stepfs merge run/step_1.pt run/step_2.pt -o run/step_2.pt", "* exists; name a new file or directory",
            "stepfs merge run/step_1.pt run/step_2.pt -o new.pt", needs="run"),
    Mistake("a file of text is merged", "seq 99999 > text", "stepfs merge text run/step_1.pt -o new.pt", "*: not a checkpoint that stepfs understands: *",
            "stepfs merge run/step_1.pt run/step_2.pt -o new.pt", needs="run"),
    Mistake("a share of 1", "", "stepfs merge --ema 1 run/step_1.pt run/step_2.pt -o new.pt",
            "--ema *: name a share between 0 and 1, such as 0.8", "stepfs merge --ema 0.8 run/step_1.pt run/step_2.pt -o new.pt", needs="run"),
    Mistake("fewer weights than files", "", "stepfs merge --weights 1 run/step_1.pt run/step_2.pt -o new.pt",
            "--weights has * numbers for * files; name one for each",
            "stepfs merge --weights 1,2 run/step_1.pt run/step_2.pt -o new.pt", needs="run"),
    Mistake("weights without a sum", "", "stepfs merge --weights 1,-1 run/step_1.pt run/step_2.pt -o new.pt",
            "--weights: the numbers must be finite, and their sum not 0",
            "stepfs merge --weights 2,-1 run/step_1.pt run/step_2.pt -o new.pt", needs="run"),
    Mistake("a mean of a state that diverged",
            "$PYTHON -c 'import torch; s = torch.load(\"run/step_2.pt\", weights_only=False); "
            "next(iter(s[\"model\"].values())).fill_(float(\"nan\")); torch.save(s, \"nan.pt\")'",
            "stepfs merge run/step_1.pt nan.pt -o new.pt",
            "stepfs: not all values are finite in * of the mean (*): one of the checkpoints diverged",
            "stepfs diff run/step_1.pt nan.pt", 0, "run"),
    Mistake("an output inside a store", "", "stepfs merge run/step_1.pt run/step_2.pt -o st/objects/new.pt",
            "* lies inside the store *; name a place outside, or in its mount",
            "stepfs merge run/step_1.pt run/step_2.pt -o new.pt", needs="run st"),
    Mistake("a checkpoint is compared with an array", "$PYTHON -c 'import numpy; numpy.save(\"e.npy\", numpy.ones(9))'",
            "stepfs diff run/step_1.pt e.npy", "* and * have no tensor of the same name; name two checkpoints of one model",
            "stepfs diff run/step_1.pt run/step_2.pt", needs="run"),
    # --- compare, tune
    Mistake("one checkpoint is compared", "", "stepfs compare run/step_1.pt",
            "*: only one checkpoint; name at least two of one run, oldest first",
            "stepfs compare --codecs exact run/step_1.pt run/step_2.pt", needs="run"),
    Mistake("files that are no checkpoints are compared", "seq 99999 > a; seq 99999 > b", "stepfs compare a b",
            "*: not a checkpoint that stepfs understands: *", "stepfs inspect a b"),
    Mistake("a directory without checkpoints is compared", "mkdir d", "stepfs compare d",
            "a directory without checkpoints in it; name the files themselves", "stepfs compare --codecs exact run", needs="run"),
    Mistake("an unknown codec", "", "stepfs compare --codecs zip run", "there is no codec *; there are:",
            "stepfs compare --codecs zstd-3 run", needs="run"),
    Mistake("a level that zstd does not have", "", "stepfs compare --codecs zstd-99 run", "* is no level of zstd; write 1 to 22",
            "stepfs compare --codecs zstd-1 run", needs="run"),
    Mistake("files that are lossy already", "", "stepfs compare $M/run/step_1.pt $M/run/step_2.pt",
            "*: stepfs has released this with loss*; a measurement would compare the loss with itself",
            "stepfs compare --codecs exact run/step_1.pt run/step_2.pt", needs="M run"),
    Mistake("a directory with other files beside checkpoints", "echo x > run/notes", "stepfs compare --codecs exact run",
            "stepfs: left out: *: *", "stepfs compare --codecs exact run/*.pt", 0, "run"),
    Mistake("checkpoints of two models", "", "stepfs compare --codecs exact run/step_1.pt other.pt", "* is not of the same model as *: *",
            "stepfs compare --codecs exact run/step_1.pt run/step_2.pt", needs="run"),
    Mistake("a score that fails", "", "stepfs tune run --eval 'exit 3 #'", "--eval * failed (*)", TUNED, needs="run"),
    Mistake("a score that is no number", "", "stepfs tune run --eval 'echo good #'",
            "--eval *: the last line of its output must be a number", TUNED, needs="run"),
    Mistake("a score that is infinite", "", "stepfs tune run --eval 'echo inf #'",
            "--eval gives * for the file as it was written; it must print a finite number", TUNED, needs="run"),
    Mistake("a score of zero with a relative tolerance", "", "stepfs tune run --eval 'echo 0 #'",
            "--eval gives 0 for the file as it was written, so no relative tolerance is possible; add --absolute",
            "stepfs tune run/step_1.pt run/step_2.pt --near inshrinkerator-12bins --eval 'echo 0 #' --absolute", needs="run"),
    Mistake("a score that differs at each call", "", "stepfs tune run --eval 'echo $((++n + $(date +%N | sed s/^0*//))) #'",
            "--eval gives *, then * for the same bytes, which exceeds the tolerance; fix its random seed", TUNED, needs="run"),
    Mistake("a tolerance in words", "", "stepfs tune run --tolerance little", "write 1% or 0.01",
            "stepfs tune run/step_1.pt run/step_2.pt --near inshrinkerator-12bins --tolerance 500%", USAGE, "run"),
    Mistake("a neighbour that is no configuration", "", "stepfs tune run --near lc-3",
            "* is not a configuration of Inshrinkerator; write inshrinkerator-12bins, for example",
            "stepfs tune run/step_1.pt run/step_2.pt --near inshrinkerator-12bins --tolerance 500%", USAGE, "run"),
    Mistake("tune for a store that is mounted", "", "stepfs tune run --store $S",
            "the store is in use, and a mount only reads its settings at the start",
            "stepfs profile --set balanced $M/run; stepfs profile --unset $M/run", needs="M run"),
    # --- convert
    Mistake("a file that was cut short is converted", "head -c 9999 run/step_1.pt > cut.pt", "stepfs convert cut.pt -o x.safetensors",
            "*: *; name a whole checkpoint: `stepfs latest` finds the newest", "stepfs convert $(stepfs latest $M/run) -o x.safetensors", needs="run M"),
    Mistake("a copy inside of its original", "", "stepfs convert run -o run/x.pt", "* lies inside *; name a place outside of it",
            "stepfs convert run/step_1.pt -o x.pt", needs="run"),
    Mistake("a copy of no known format", "", "stepfs convert run/step_1.pt -o x", "*: name a file .safetensors or .pt, or tell the format with --to",
            "stepfs convert run/step_1.pt -o x --to dcp", needs="run"),
    Mistake("shards of torch", "", "stepfs convert run/step_1.pt -o x.pt --shard 1G", "--shard is for safetensors alone; leave it out",
            "stepfs convert run/step_1.pt -o x.pt", needs="run"),
    Mistake("shards of no bytes", "", "stepfs convert run/step_1.pt -o x --shard 0", "--shard 0: name the most bytes of a file, such as 5G",
            "stepfs convert run/step_1.pt -o x --shard 5G", needs="run"),
    Mistake("a prefix that no name has", "", "stepfs convert run/step_1.pt -o x.pt --strip-prefix modle",
            "no name begins with the prefix that --strip-prefix names; the first is *", "stepfs convert run/step_1.pt -o x.pt --strip-prefix ${1%%.*}",
            needs="run"),
    Mistake("a run is converted as one checkpoint", "", "stepfs convert run -o x.pt", "two tensors have the name *; convert one file of the directory",
            "stepfs convert run/step_1.pt -o x.pt", needs="run"),
    Mistake("a shard is missing", "stepfs convert run/step_1.pt -o hf --shard 1K; rm hf/model-00001-*", "stepfs convert hf -o x.pt",
            "*: * lists *, which is missing", "stepfs convert run/step_1.pt -o x.pt", needs="run"),
    Mistake("a shard is damaged", "stepfs convert run/step_1.pt -o hf --shard 1K; echo version > $(ls hf/model-00001-*)", "stepfs convert hf -o x.pt",
            "*: no tensors can be read: *; get the file again, or name one file", "stepfs convert run/step_1.pt -o x.pt", needs="run"),
    Mistake("a shard is another one", "stepfs convert run/step_1.pt -o hf --shard 1K; cp hf/model-00002-* $(ls hf/model-00001-*)",
            "stepfs convert hf -o x.pt", "* has no *, which the index lists; get both again, or name one file",
            "stepfs convert run/step_1.pt -o x.pt", needs="run"),
    Mistake("one file of a distributed checkpoint", "stepfs convert run/step_1.pt -o d --to dcp; cp d/__0_0.distcp d/__1_0.distcp; rm d/__0_0.distcp",
            "stepfs convert d -o x.pt", "*: * is not whole; name a directory with all files", "stepfs convert run/step_1.pt -o x.pt", needs="run"),

    # --- reshard
    Mistake("a version that does not exist", "", "stepfs reshard none 3 out", "*: no such file or directory; of a store write STORE:PATH, of a mirror URL:PATH",
            "stepfs reshard edl 3 out", needs="edl"),
    Mistake("a store in place of a version", "mkdir x; mv edl x/version-40; stepfs import st x/version-40", "stepfs reshard st 3 out",
            "* is a store; name a path in it: *", "stepfs reshard ${2%PATH}version-40 3 out", needs="st edl"),
    Mistake("a version outside of the store", "", "stepfs reshard st:../edl 3 out", "*: name a path inside the store, without `..`",
            "stepfs reshard edl 3 out", needs="st edl"),
    Mistake("a version that the store does not have", "", "stepfs reshard st:version-7 3 out", "*: * has no *", "stepfs ls st",
            needs="st"),
    Mistake("other files in a version", "touch edl/notes", "stepfs reshard edl 3 out", "* is not a file of an ElasticDL checkpoint",
            "rm edl/$1; stepfs reshard edl 3 out", needs="edl"),
    Mistake("an empty version", "mkdir none", "stepfs reshard none 3 out", "* is empty", "stepfs reshard edl 3 out", needs="edl"),
    Mistake("two checkpoints in one version", "cp edl/variables-0-of-2.ckpt edl/variables-0-of-3.ckpt", "stepfs reshard edl 3 out",
            "*: * and * belong to different checkpoints", "rm edl/variables-0-of-3.ckpt; stepfs reshard edl 3 out", needs="edl"),
    Mistake("a part of a version is missing", "mv edl/variables-1-of-2.ckpt x", "stepfs reshard edl 3 out",
            "* is not complete: it has * of * files, * is missing", "mv x edl/$4; stepfs reshard edl 3 out", needs="edl"),
    Mistake("the new version's directory is not empty", "mkdir out; touch out/a", "stepfs reshard edl 3 out",
            "* is not empty; name a directory that does not exist yet", "stepfs reshard edl 3 out2", needs="edl"),
    Mistake("the new version's name is a file's", "touch out", "stepfs reshard edl 3 out",
            "* exists and is not a directory; name a new directory", "stepfs reshard edl 3 out2", needs="edl"),
    Mistake("a new version without a name", "", "stepfs reshard edl 3 none/..", "*: name a new directory", "stepfs reshard edl 3 out",
            needs="edl"),
    Mistake("a reshard that was killed", "mkdir .stepfs_-0", "stepfs reshard edl 3 out",
            "*: another reshard is at work here, or was cut short (then remove it)", "rmdir $1; stepfs reshard edl 3 out", needs="edl"),
    # --- settings
    Mistake("stepfs.toml is gone", "mv st/stepfs.toml x", "stepfs ls st",
            "* is a stepfs store without stepfs.toml; restore that file from a backup, or write it with these lines:\nformat = *\nstore = "
            "*\ndefault_profile = *\ncache_mib = 10240",
            "printf 'format = %s\\nstore = %s\\ndefault_profile = %s\\ncache_mib = 10240\\n' $2 $3 $4 > st/stepfs.toml; stepfs verify "
            "st", needs="st"),
    Mistake("a store of a later version", "sed -i 's/^format = .*/format = 9/' st/stepfs.toml", "stepfs ls st",
            ["*: the store has format *, this stepfs reads format * only; ",
             "use a newer stepfs; without one, the store's own read_store.py reads it (see its README)"],
            "python3 -c 'import numpy, zstandard' || exit 0; sed -i s/9/2/ st/stepfs.toml; python3 st/read_store.py st ls", needs="st"),
    Mistake("a store of a former version", "sed -i 's/^format = .*/format = 1/' st/stepfs.toml", "stepfs ls st",
            "export the files with a former stepfs, and save them to a new store", "stepfs mount new m", needs="st"),
    Mistake("a part of the store is a link", "mv st/objects elsewhere; ln -s ../elsewhere st/objects", "stepfs ls st",
            "* is a symlink or no *; a store's files and directories must be real ones", "rm $1; mv elsewhere $1; stepfs ls st",
            needs="st"),
    Mistake("a store's id that is cut off", "cp st/stepfs.toml good; sed -i 's/^store = .*/store = \"12\"/' st/stepfs.toml", "stepfs ls st",
            "`store` is not 32 hexadecimal digits", "cp good st/stepfs.toml; stepfs ls st", needs="st"),
    Mistake("the id of another store",
            "cp st/stepfs.toml good; sed -i 's/^store = .*/store = \"00112233445566778899aabbccddeeff\"/' st/stepfs.toml", "stepfs gc st",
            "`store` is another id than the stubs in tree/ have; take stepfs.toml from a backup, or move it away, and `stepfs verify "
            "STORE` says the id",
            "mv st/stepfs.toml x; (stepfs verify st || true) 2>&1 | grep -E '^(format|store|default|cache)' > new; mv new st/stepfs.toml; "
            "stepfs gc st", needs="st"),
    setting("a setting at the end of the file", "cache_mib = 5\\n",
            "A line after a [table] belongs to that table: move `*` above the first line that begins with `[`."),
    setting("expected restores of files that stay exact", "expected_restores = 3\\n",
            "a [[profile]] that keeps files exact has `expected_restores`, which has no effect there."),
    Mistake("a trash without a time", "cp st/stepfs.toml good; sed -i 's/^cache_mib/trash_for = \"long\"\\n&/' st/stepfs.toml", "stepfs ls st",
            "trash_for is no time; write 12h or 7d", "cp good st/stepfs.toml; stepfs ls st", needs="st"),
    Mistake("a reserve that is no size", "cp st/stepfs.toml good; sed -i 's/^cache_mib/reserve = \"much\"\\n&/' st/stepfs.toml", "stepfs ls st",
            "reserve = * is no size; write \"20 GB\"", "cp good st/stepfs.toml; stepfs ls st", needs="st"),
    setting("a rule without a role", "[[profile]]\\nrole = []\\nprofile = \"exact\"\\n",
            "role = []: the rule has no role; leave `role` out for all roles"),
    setting("a misspelled role", "[[profile]]\\nrole = [\"wight\"]\\nprofile = \"exact\"\\n", "role = * does not exist; write *"),
    setting("a rule without a glob", "[[retention]]\\nglob = \"\"\\nkeep_last = 3\\n", "a glob is needed, such as \"run/checkpoint-*\""),
    setting("a glob that begins with a slash", "[[retention]]\\nglob = \"/run/*\"\\nkeep_last = 3\\n",
            "a glob matches the path inside the mount: no `/` or `./` before it, no `..`"),
    setting("a rule that keeps nothing", "[[retention]]\\nglob = \"run/*\"\\n",
            "it keeps nothing; give keep_last, keep_every, keep_for or keep_checkpoint_max"),
    setting("a rule that keeps none", "[[retention]]\\nglob = \"run/*\"\\nkeep_last = 0\\n",
            "keep_last = 0 is impossible, since the newest complete checkpoint always stays; write 1"),
    setting("a rule with a step of zero", "[[retention]]\\nglob = \"run/*\"\\nkeep_every = 0\\n",
            "keep_every = 0: no step is a multiple of 0"),
    setting("a rule with a time in words", "[[retention]]\\nglob = \"run/*\"\\nkeep_for = \"a week\"\\n",
            "keep_for = *: write a whole number and s, m, h, d or w, such as \"7d\""),
    setting("a rule with a time without end", "[[retention]]\\nglob = \"run/*\"\\nkeep_for = \"900000d\"\\n",
            "keep_for = * is longer than 292 years"),
    setting("a mirror with a time in words", "[mirror]\\nurl = \"file:///x\"\\nkeep_manifests = \"long\"\\n",
            "keep_manifests is no time; write 12h or 7d"),
    setting("a mirror without bandwidth", "[mirror]\\nurl = \"file:///x\"\\nbandwidth_mib = 0.0\\n",
            "bandwidth_mib is not above 0; leave it out for no limit"),
    Mistake("settings of a megabyte", "cp st/stepfs.toml good; head -c 2000000 /dev/zero | tr '\\0' '#' >> st/stepfs.toml", "stepfs ls st",
            "it is too large for settings", "cp good st/stepfs.toml; stepfs ls st", needs="st"),
    Mistake("no line of its own for the default profile",
            "cp st/stepfs.toml good; sed -i 's/^default_profile/\"default_profile\"/' st/stepfs.toml", "stepfs mount st m --profile exact",
            "`default_profile` has no line of its own", "cp good st/stepfs.toml; stepfs mount st m --profile exact", needs="st"),
    # --- profiles and systems
    option("a published system without its number", "--profile topn", "*: * has a number, *", "--profile topn-10"),
    option("a published system with another number", "--profile lc-99", "*: * has a number, *", "--profile lc-3"),
    option("a system that has no number", "--profile qd-compressor-3", "*: * has no number", "--profile qd-compressor"),
    option("a configuration with too many bins", "--profile inshrinkerator-999bins", "*: bins are 2 to 239, percentages 0 to 100",
           "--profile inshrinkerator-12bins"),
    option("a configuration by another name", "--profile inshrinkerator-16bins", "* is called *", "--profile ${2%;}"),
    option("a configuration with an unknown part", "--profile inshrinkerator-12bins-small",
           "*: write *-12bins, then the differences in this order: -embedding32 -prune30 -sensitivity -protect0.5",
           "--profile inshrinkerator-12bins-prune30-sensitivity"),
    # --- damage
    Mistake("an object is damaged, and the store has a mirror", DAMAGE.format("mirrored"), "stepfs verify mirrored",
            ["a tile's checksum does not match", "* can be repaired: unmount the store, then `stepfs verify --repair STORE`"],
            "stepfs verify --repair mirrored; stepfs verify mirrored", DAMAGED, "mirrored"),
    Mistake("an object is gone", "rm -r st/objects/*", "stepfs status --check st", "* cannot be read: *",
            "(stepfs verify --repair st || true) | grep 'cannot be repaired; restore it from a backup'", needs="st"),
    Mistake("a damaged file is read", DAMAGE.format("st"), "stepfs cat st run/step_1.pt > out", "*: *; `stepfs verify *` says more",
            "next=$( (stepfs verify $3 || true) | grep -om1 'stepfs export --salvage.*'); ($next || true) | grep 'tensors written'",
            needs="st"),
    Mistake("an object was cut short", "for o in $(find st/objects -type f); do chmod 600 $o; truncate -s 100 $o; done", "stepfs status st",
            "stepfs: object *: *", "(stepfs verify st || true) | grep 'restore it from a backup'", 0, "st"),
    Mistake("a stub was overwritten",
            "touch -r st/tree/run/step_1.pt t; head -c 4096 /dev/zero | dd of=st/tree/run/step_1.pt conv=notrunc status=none; touch -r "
            "t st/tree/run/step_1.pt", "stepfs cat st run/step_1.pt",
            "*: its stub of object * was overwritten; run `stepfs verify --repair`",
            "stepfs verify --repair st; stepfs cat st run/step_1.pt > out", needs="st"),
    Mistake("a damaged file is to come back", "stepfs mount st m; " + DAMAGE.format("st"), "stepfs recall m/run",
            "it is damaged; the daemon's log and `stepfs verify` say more", "(stepfs verify st || true) | grep damaged", needs="st"),
    Mistake("a checkpoint was cut short", "head -c 200000 run/step_4.pt > x; mv x run/step_4.pt; stepfs import new run",
            "stepfs status --check new", "* is cut short: *", "stepfs mount new m; stepfs latest m", needs="run"),
    Mistake("the best checkpoint was cut short",
            "mkdir $M/short; for n in 1 2; do cp run/step_$n.pt $M/short/epoch=$n-val_loss=0.$n.ckpt; done; truncate -s 200000 "
            "$M/short/epoch=1*; ln -s epoch=1-val_loss=0.1.ckpt $M/short/best.ckpt; stepfs sync $M", "stepfs best $M/short",
            "the best is not whole*", "stepfs latest $M/short", needs="M run"),
    Mistake("bytes of a mirror are damaged", "for b in $(find mir/blobs -type f); do echo x > $b; done", f"stepfs ls {URL}",
            "* is damaged: its bytes are not what its name says", "stepfs ls st", DAMAGED, "st mir"),
    Mistake("bytes of a mirror are gone", "rm -r mir/blobs", f"stepfs ls {URL}", "* is not on the mirror", "stepfs ls st", DAMAGED,
            "st mir"),
    Mistake("the directory of a mirror is not mounted",
            f"stepfs mount st m --mirror {URL}; stepfs sync --mirror m; mv mir away; mkdir mir; cp run/step_1.pt m/new.pt; sleep 2",
            "stepfs status --check m",
            ["the mirror * lags behind: *",
             "* is missing: is the file system mounted? A new mirror begins with `stepfs mount --mirror URL`"],
            "rmdir mir; mv away mir; stepfs sync --mirror m", needs="st run"),
    Mistake("a pull into a store where a file has the name of a directory",
            "echo x > run2; mv run run1; mv run2 run; stepfs import other run", f"stepfs pull {URL} other",
            "something else has the place of its directory", f"stepfs pull {URL} new", DAMAGED, "mir run"),
    Mistake("a full disk for the output", "", "stepfs status st > /dev/full", "stepfs: standard output: *", "stepfs status st > out",
            needs="st"),
    Mistake("the store of another user", "chmod 755 .", f"{NOBODY} stepfs ls st",
            ["st/stepfs.toml: Permission denied", "; work as its owner, or as root"], "stepfs ls st", needs="st root"),
    Mistake("a read-only file system", "mkdir disk; mount -t tmpfs tmpfs disk; cp -a st disk; mount -o remount,ro disk",
            "stepfs mount disk/st m", "; mount its file system read-write: mount -o remount,rw",
            "mount -o remount,rw disk; stepfs mount disk/st m", needs="st root"),
    Mistake("a full disk", "mkdir disk; mount -t tmpfs -o size=2m tmpfs disk; head -c 2000000 /dev/zero > disk/fill",
            "stepfs export st run disk/out", "; make room there, and try again", "rm disk/fill; stepfs export --force st run disk/out",
            needs="st root"),
    Mistake("no place for temporary files", "", f"TMPDIR=/none stepfs cat {URL} run/step_1.pt",
            "cannot create temporary files; set TMPDIR to a directory with room: *", f"TMPDIR=$PWD stepfs cat {URL} run/step_1.pt > out",
            needs="mir"),
    Mistake("a store is imported", "cp -a st other", "stepfs import st other",
            "* is a store; `stepfs export * . DIR` writes its files, and then import DIR",
            "stepfs export $2 . dir; stepfs import --to x st dir", needs="st"),
    Mistake("files in a store's own directory are imported", "", "stepfs import new st/tree/run", LIES,
            "stepfs export st run out; stepfs import new out", needs="st"),
    Mistake("a log in a directory that is missing", "", "stepfs mount st m --log none/log", "cannot write the log *",
            "stepfs mount st m --log log", needs="st"),
    Mistake("a mount point that cannot be made", "", "stepfs mount st /proc/none", "cannot make the mount point *", "stepfs mount st m",
            needs="st"),
    Mistake("the objects of a mounted store were removed", "stepfs mount st m; mv st/objects gone", "stepfs status --check m",
            "* is gone: released files cannot be read", "mv gone st/objects; stepfs status --check m; cat m/run/* > out", needs="st"),
    Mistake("two mounts of a store at once", "", "stepfs mount st m & stepfs mount st m2; wait", IN_USE, "stepfs status st", 0, "st"),
    Mistake("a screen without a terminal", "", "stepfs top $M", "there is no terminal for a screen; `stepfs status -v` prints the same as text",
            "stepfs status -v $M", needs="M"),
    Mistake("small files are tuned", "", "stepfs tune tiny", "it is below * bytes, and stepfs keeps such files as they are", TUNED,
            needs="run tiny"),
]

CODECS = (r"crates/(codec|papers/src/(?!registry|inshrinkerator/named)|formats)|"
          r"src/(store/(object|bytes|record|restores|stub)|recall|encode|archive/re|archive/merge)")
# (path, expression): the reason why the catalogue has no entry for such messages.
LEFT_OUT = {
    (CODECS, ""): "a reason of damage, after the names of file and object: the entries on damage show the next step",
    ("src/cli/doctor", ""): "a finding with its own `fix`: test_doctor provokes those that one machine can show",
    ("crates/passthrough", ""):
        "ends the helper, and is in the log of the daemon, which serves without it: crates/passthrough/tests/attacks",
    ("src/archive/(status|health)", ""): "a problem of `status`, or its next step: test_manners and test_faults",
    ("src/cli/profile", "by the rules"): "no error",
    ("src/(store/(error|settings)|archive/mod)", "32 hex|unknown field|expected_restores|stepfs.toml"):
        "a part of another message, or of its test",
    ("src/mirror/(tree|pieces|pull|work|states|place|manifest)", ""):
        "a reason of damage on a mirror, after its name: test_mirror, and src/mirror/tests",
    ("src/mirror/bucket", ""): "an answer of a server: src/mirror/bucket, test_mirror",
    ("src/mirror/states", "the daemon stops"): "ends a thread of the daemon; nobody sees it",
    ("src/mirror/url", "without s3"): "only a program that was built so",
    ("src/mirror/directory", "no room"): "in `status`, while the mirror is full: test_mirror",
    ("src/mirror/directory", "no mirror of stepfs"): "in the log: the mark is looked for first",
    ("src/cli/mirror", "a directory cannot be read"): "beside damage on a mirror: src/mirror/tests",
    ("src/cli/(pull|)", "interrupted"): "test_mirror: interrupted_commands_leave_nothing_and_go_on",
    ("src/terminal/interrupt", "interrupted"): "test_transfer, test_tune and test_elasticdl: an_interrupt...",
    ("src/terminal/mod", "exit code"): "only a code: the command has told the reason itself",
    ("src/tools/(series|tune/mod)", "the file has no name|changed meanwhile|default_profile ="):
        "a race with another program, or a defect",
    ("src/tools/tune/(mod|eval)", "the file as it was|has no weights|cannot start sh"): "a reason in another message: test_tune",
    ("src/tools/series", "one is a|it has no|is . and not|other roles|at least two"): "a reason in `is not of the same model as`",
    ("src/tools/compare", "more than|does not come back"): "a file above 2 GiB, a race with another program, or a defect",
    ("crates/papers/src/registry", ""): "clap and the entries on profiles say it in other words",
    ("src/cli/(against|import|inspect|source|place)", "cannot compare|no distributed|does not answer|not complete"):
        "the place of another error, or a race",
    ("src/cli/(import|sync|wait|recall)", "imported, but|not archived|stalled|no room|not on the mirror"):
        "a full disk or a mirror that is away: test_faults, test_mirror",
    ("src/cli/source", "no extended attributes"): "needs a file system without them: test_doctor",
    ("src/cli/passthrough", ""): "the list of users is broken, or no process can be made",
    ("src/cli/umount", "waits again|to finish its step"): "a daemon that works on for seconds: test_lifecycle",
    ("src/cli/mount", "the daemon ended|cannot mount on"): "a defect of the daemon, and the place of another error",
    ("src/cli/status", "has not answered"): "takes 10 seconds: test_manners: a_daemon_that_hangs_is_named",
    ("src/cli/status", "keeps root out"): "needs a mount of another user: test_metrics: root_is_told_of_mounts",
    ("src/cli/top", "cannot show a screen"): "the terminal fails",
    ("src/tools/(merge|checkpoint|output)", "is in the way|no checkpoints|no states|no file in it|names its tensors"):
        "a killed command, a defect, or a part of another message",
    ("src/tools/convert/source", "another type or shape|that stepfs does not know|no index of tensors"):
        "a damaged index, or a type of a torch to come",
    ("src/tools/convert", "left to write|inside of objects|has no name|convert reads|safetensors has"): "test_convert: what_cannot_be_converted_is_said",
    ("src/tools/merge", "has no|: . is|rows of their own"): "test_diff_merge: what_cannot_be_merged_is_said",
    ("src/cli/latest", "time in the future"): "test_machine: files_from_the_future",
    ("src/cli/source", "does not understand its answer"): "a daemon of another version: test_upgrade",
    ("src/fs/error", "is unmounted here"): "test_manners: a_mount_that_another_namespace_holds",
    ("src/fs/error", "/dev/fuse"): "test_manners: a_closed_device_is_named",
    ("src/fs/(error|mounts?)", "as mount point|cannot be ended|cannot read the store|connection to the kernel|panicked|does not answer"):
        "the kernel or the device fails",
    ("src/store/(beneath|transfer)", ""): "another program exchanges a file in that moment",
}
