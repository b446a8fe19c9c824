//! Attacks on the helper. Each is refused or harmless, and an honest request succeeds beside it. They need root, which
//! makes the users, and FUSE with passthrough (Linux 6.9).

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use fuser::{Config, Filesystem, InitFlags, KernelConfig, Request, Session, SessionACL};
use passthrough::Client;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// The caller: nobody.
const CALLER: u32 = 65534;
/// Another user.
const OTHER: u32 = 1001;
const EACCES: i32 = libc::EACCES;

/// A connection to the kernel's FUSE with passthrough, mounted for a user.
struct Mount {
    session: Session<Nothing>,
    point: PathBuf,
}

struct Nothing;

impl Filesystem for Nothing {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).map_err(|_| io::ErrorKind::Unsupported)?;
        config.set_max_stack_depth(1).map_err(|_| io::ErrorKind::Unsupported)?;
        Ok(())
    }
}

impl Mount {
    fn of(user: u32, point: &Path) -> Mount {
        fs::create_dir(point).unwrap();
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id={user},group_id={user}", device.as_raw_fd());
        let options = std::ffi::CString::new(options).unwrap();
        rustix::mount::mount("attacks", point, "fuse.attacks", rustix::mount::MountFlags::empty(), options.as_c_str())
            .unwrap();
        let session = Session::from_fd(Nothing, device.into(), SessionACL::Owner, Config::default()).unwrap();
        Mount { session, point: point.to_path_buf() }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.point, rustix::mount::UnmountFlags::DETACH);
    }
}

/// A directory of the caller on a file system that is allowed, a mount of the caller, and the helper's program.
struct Place {
    mount: Mount,
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        Place { mount: Mount::of(CALLER, &dir.path().join("mnt")), dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn connection(&self) -> BorrowedFd<'_> {
        self.mount.session.as_fd()
    }

    /// A file of `user`, open as `options` say.
    fn file(&self, name: &str, user: u32, options: &OpenOptions) -> File {
        let path = self.path(name);
        if !path.exists() {
            fs::write(&path, b"bytes").unwrap();
            chown(&path, Some(user), Some(user)).unwrap();
        }
        options.open(path).unwrap()
    }

    /// An honest request.
    fn honest(&self, client: &Client) {
        let file = self.file("honest", CALLER, &both());
        let number = client.open(self.connection(), file.as_fd()).expect("a file of the caller");
        client.close(self.connection(), number).expect("what it has opened");
    }

    fn refuses(&self, client: &Client, file: impl AsFd, what: &str) {
        let error = client.open(self.connection(), file.as_fd()).expect_err(what);
        assert_eq!(error.raw_os_error(), Some(EACCES), "{what}: {error}");
        self.honest(client);
    }
}

/// What the kernel says of a connection.
fn notes(mount: &Mount) -> String {
    fs::read_to_string(format!("/proc/self/fdinfo/{}", mount.session.as_fd().as_raw_fd())).unwrap()
}

fn both() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    options
}

/// By another process: a child of another test's thread would inherit a descriptor that writes to the copy, and nobody
/// could execute it meanwhile.
fn copy_program(to: &Path) {
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_stepfs-passthrough")).arg(to).status().unwrap().success());
}

/// The helper with its file capability, where all users reach it.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, program) = PROGRAM.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let program = dir.path().join("stepfs-passthrough");
        copy_program(&program);
        let set = Command::new("setcap").arg("cap_sys_admin=ep").arg(&program).status().expect("setcap (libcap2-bin)");
        assert!(set.success());
        (dir, program)
    });
    program
}

/// The helper as the caller runs it, with standard input as its socket.
fn command(socket: OwnedFd) -> Command {
    let mut command = Command::new(program());
    command.uid(CALLER).gid(CALLER).stdin(Stdio::from(socket));
    command
}

/// A helper and the process it runs in.
fn helper() -> (Client, Child) {
    let (ours, theirs) = passthrough::pair().unwrap();
    let child = command(theirs).spawn().unwrap();
    (Client::over(ours).unwrap(), child)
}

/// What a helper says that does not serve.
fn fails(command: &mut Command) -> String {
    let Output { status, stderr, .. } = command.stderr(Stdio::piped()).output().unwrap();
    assert!(!status.success());
    String::from_utf8(stderr).unwrap()
}

/// Sends a request by hand. False: the socket takes no more for now.
fn request(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
    let mut space = vec![MaybeUninit::uninit(); 1024];
    let mut extra = SendAncillaryBuffer::new(&mut space);
    extra.push(SendAncillaryMessage::ScmRights(descriptors));
    match sendmsg(socket, &[IoSlice::new(bytes)], &mut extra, SendFlags::DONTWAIT) {
        Ok(_) => true,
        // Too many descriptors on their way count as too much, too.
        Err(Errno::AGAIN | Errno::TOOMANYREFS) => false,
        Err(error) => panic!("{error}"),
    }
}

/// The next answer: a number, or a negative errno.
fn answer(socket: &OwnedFd) -> i32 {
    let mut answer = [0; 64];
    assert_eq!(File::from(socket.try_clone().unwrap()).read(&mut answer).unwrap(), 4);
    i32::from_le_bytes(answer[..4].try_into().unwrap())
}

/// What a program of the caller prints about a helper. `pid` is its process.
fn by_caller(child: &Child, script: &str) -> String {
    let script = format!("import ctypes, os, resource\npid, c = {}, ctypes.CDLL(None)\n{script}", child.id());
    let done = Command::new("python3").args(["-c", &script]).uid(CALLER).gid(CALLER).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stdout).unwrap()
}

#[test]
fn files_that_the_caller_may_not_change_as_it_likes_are_refused() {
    let (place, (client, _child)) = (Place::new(), helper());
    let mut read = OpenOptions::new();
    place.refuses(&client, place.file("read", CALLER, read.read(true)), "open for reading only");
    let mut write = OpenOptions::new();
    place.refuses(&client, place.file("write", CALLER, write.write(true)), "open for writing only");
    let mut append = OpenOptions::new();
    place.refuses(&client, place.file("append", CALLER, append.read(true).append(true)), "open for appending");
    let mut reference = OpenOptions::new();
    reference.read(true).custom_flags(libc::O_PATH);
    place.file("secret", 0, &both());
    fs::set_permissions(place.path("secret"), Permissions::from_mode(0o600)).unwrap();
    place.refuses(&client, place.file("secret", 0, &reference), "a reference to a file of root");
    place.refuses(&client, place.file("reference", CALLER, &reference), "a reference to an own file");
    place.refuses(&client, place.file("others", OTHER, &both()), "a file of another user");
    place.refuses(&client, place.file("roots", 0, &both()), "a file of root that root has opened");
    for (name, mode) in [("suid", 0o4755), ("sgid", 0o2755)] {
        let file = place.file(name, CALLER, &both());
        fs::set_permissions(place.path(name), Permissions::from_mode(mode)).unwrap();
        place.refuses(&client, file, name);
    }
    for (name, flag) in [("immutable", "i"), ("append_only", "a")] {
        let file = place.file(name, CALLER, &both());
        let chattr = |sign: &str| Command::new("chattr").arg(format!("{sign}{flag}")).arg(place.path(name)).status();
        assert!(chattr("+").unwrap().success());
        place.refuses(&client, file, name);
        assert!(chattr("-").unwrap().success());
    }
}

#[test]
fn what_is_no_file_of_a_known_file_system_is_refused() {
    let (place, (client, _child)) = (Place::new(), helper());
    place.refuses(&client, File::open(place.dir.path()).unwrap(), "a directory");
    place.refuses(&client, passthrough::pair().unwrap().0, "a socket");
    place.refuses(&client, io::pipe().unwrap().1, "a pipe");
    place.refuses(&client, both().open("/dev/null").unwrap(), "a device");
    place.refuses(&client, both().open("/dev/fuse").unwrap(), "FUSE itself");
    place.refuses(&client, place.connection(), "the connection");
    place.refuses(&client, both().open("/proc/self/comm").unwrap(), "a file of /proc");
    let ramfs = place.path("ramfs");
    fs::create_dir(&ramfs).unwrap();
    rustix::mount::mount("attacks", &ramfs, "ramfs", rustix::mount::MountFlags::empty(), None).unwrap();
    fs::write(ramfs.join("file"), b"bytes").unwrap();
    chown(ramfs.join("file"), Some(CALLER), None).unwrap();
    place.refuses(&client, both().open(ramfs.join("file")).unwrap(), "another file system");
    rustix::mount::unmount(&ramfs, rustix::mount::UnmountFlags::DETACH).unwrap();
    let [lower, upper, work, merged] = ["lower", "upper", "work", "merged"].map(|name| place.path(name));
    [&lower, &upper, &work, &merged].iter().for_each(|dir| fs::create_dir(dir).unwrap());
    let layers = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let layers = std::ffi::CString::new(layers).unwrap();
    rustix::mount::mount("attacks", &merged, "overlay", rustix::mount::MountFlags::empty(), layers.as_c_str()).unwrap();
    fs::write(merged.join("file"), b"bytes").unwrap();
    chown(merged.join("file"), Some(CALLER), None).unwrap();
    place.refuses(&client, both().open(merged.join("file")).unwrap(), "a stacked file system");
    rustix::mount::unmount(&merged, rustix::mount::UnmountFlags::DETACH).unwrap();
}

#[test]
fn a_connection_that_is_not_the_callers_is_refused() {
    let (place, (client, _child)) = (Place::new(), helper());
    let file = place.file("file", CALLER, &both());
    let refused = |connection: BorrowedFd<'_>, what: &str| {
        let error = client.open(connection, file.as_fd()).expect_err(what);
        assert!(matches!(error.raw_os_error(), Some(EACCES | libc::EPERM)), "{what}: {error}");
    };
    refused(File::open("/dev/null").unwrap().as_fd(), "another device");
    refused(file.as_fd(), "a file");
    refused(passthrough::pair().unwrap().0.as_fd(), "a socket");
    // Without a number in fdinfo (Linux before 6.16) these three cannot be told from an own connection.
    if notes(&place.mount).contains("fuse_conn") {
        let others = Mount::of(OTHER, &place.path("others"));
        refused(others.session.as_fd(), "a mount of another user");
        let roots = Mount::of(0, &place.path("roots"));
        refused(roots.session.as_fd(), "a mount of root");
        place.honest(&client);
        let second = Mount::of(CALLER, &place.path("second"));
        refused(second.session.as_fd(), "a second mount, after the first");
    }
    let fresh = both().open("/dev/fuse").unwrap();
    refused(fresh.as_fd(), "a connection that is not mounted");
    place.honest(&client);
}

#[test]
fn requests_that_make_no_sense_are_answered_and_do_no_harm() {
    let (place, (ours, theirs)) = (Place::new(), passthrough::pair().unwrap());
    let mut child = command(theirs).spawn().unwrap();
    assert_eq!(answer(&ours), 0);
    let file = place.file("file", CALLER, &both());
    let (connection, fd) = (place.connection(), file.as_fd());
    let open: &[u8] = &[0; 5];
    let long = [0; 4096];
    let tries: [(&[u8], &[BorrowedFd<'_>], i32); 10] = [
        (&[0], &[connection, fd], libc::EINVAL),
        (&long, &[connection, fd], libc::EINVAL),
        (open, &[], libc::EINVAL),
        (open, &[connection], libc::EINVAL),
        (open, &[connection, fd, fd], libc::EINVAL),
        (open, &[fd; 40], libc::EINVAL),
        (&[7, 0, 0, 0, 0], &[connection, fd], libc::EINVAL),
        (&[1, 0, 0, 0, 0], &[], libc::EINVAL),
        (&[1, 0, 0, 0, 0], &[connection, fd], libc::EINVAL),
        // Swapped: the file is no connection.
        (open, &[fd, connection], EACCES),
    ];
    for (bytes, descriptors, error) in tries {
        assert!(request(&ours, bytes, descriptors));
        assert_eq!(answer(&ours), -error, "{} bytes, {} descriptors", bytes.len(), descriptors.len());
    }
    let held = fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap().count();
    assert!(held <= 6, "{held} descriptors are kept");
    drop(ours);
    assert!(child.wait().unwrap().success(), "it ends with its socket");
}

#[test]
fn a_peer_that_closes_early_ends_its_own_helper_only() {
    let (place, (honest, _child)) = (Place::new(), helper());
    let file = place.file("file", CALLER, &both());
    for reads_on in [true, false] {
        let (ours, theirs) = passthrough::pair().unwrap();
        let mut child = command(theirs).stderr(Stdio::null()).spawn().unwrap();
        assert_eq!(answer(&ours), 0);
        if !reads_on {
            rustix::net::shutdown(&ours, rustix::net::Shutdown::Read).unwrap();
        }
        assert!(request(&ours, &[0; 5], &[place.connection(), file.as_fd()]));
        if reads_on {
            drop(ours);
        }
        child.wait().unwrap();
        place.honest(&honest);
    }
}

#[test]
fn a_flood_of_requests_takes_no_memory_and_is_answered_in_turn() {
    let (place, (ours, theirs)) = (Place::new(), passthrough::pair().unwrap());
    let mut child = command(theirs).spawn().unwrap();
    assert_eq!(answer(&ours), 0);
    let roots = place.file("roots", 0, &both());
    // The helper waits until somebody reads its answers, and then the socket takes no more.
    let mut sent = 0;
    while request(&ours, &[0; 5], &[place.connection(), roots.as_fd()]) {
        sent += 1;
        assert!(sent < 10_000);
    }
    let pages = fs::read_to_string(format!("/proc/{}/statm", child.id())).unwrap();
    assert!(pages.split(' ').nth(1).unwrap().parse::<u32>().unwrap() < 4096, "{pages}");
    assert!((0..sent).all(|_| answer(&ours) == -EACCES));
    drop(ours);
    assert!(child.wait().unwrap().success());
}

#[test]
fn many_helpers_of_one_user_end_with_their_sockets() {
    let place = Place::new();
    let helpers: Vec<_> = (0..40).map(|_| helper()).collect();
    helpers.iter().for_each(|(client, _)| place.honest(client));
    let children: Vec<_> = helpers.into_iter().map(|(_, child)| child).collect();
    assert!(children.into_iter().all(|mut child| child.wait().unwrap().success()));
}

#[test]
fn a_signal_ends_it_or_does_nothing_and_leaves_no_copy_of_its_memory() {
    let place = Place::new();
    let roots = place.file("roots", 0, &both());
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGABRT, libc::SIGSEGV, libc::SIGSYS, libc::SIGTERM]
    {
        let (client, mut child) = helper();
        by_caller(&child, &format!("os.kill(pid, {signal})"));
        assert!(client.open(place.connection(), roots.as_fd()).is_err());
        drop(client);
        assert!(!child.wait().unwrap().core_dumped(), "signal {signal}");
    }
}

#[test]
fn nobody_traces_it_takes_its_descriptors_or_writes_to_it_in_proc() {
    let (place, (client, child)) = (Place::new(), helper());
    let allowed = by_caller(
        &child,
        "
pidfd, buffer = os.pidfd_open(pid), (ctypes.c_uint64 * 2)()
part = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
calls = dict(attach=lambda: c.ptrace(16, pid, None, None), seize=lambda: c.ptrace(0x4206, pid, None, None),
    descriptor=lambda: c.syscall(438, pidfd, 0, 0), read=lambda: c.process_vm_readv(pid, part, 1, part, 1, 0),
    write=lambda: c.process_vm_writev(pid, part, 1, part, 1, 0))
for name, call in calls.items():
    if call() >= 0: print(name)
for name in 'mem comm oom_score_adj coredump_filter clear_refs timerslack_ns attr/current'.split():
    try: os.write(os.open(f'/proc/{pid}/{name}', os.O_WRONLY), b'0'); print(name)
    except OSError: pass
",
    );
    assert_eq!(allowed, "");
    place.honest(&client);
}

#[test]
fn limits_that_its_user_sets_while_it_runs_change_nothing() {
    let (place, (client, child)) = (Place::new(), helper());
    let raised = by_caller(
        &child,
        "
for limit in resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE:
    resource.prlimit(pid, limit, (0, 0))
for limit in resource.RLIMIT_CORE, resource.RLIMIT_NOFILE:
    try: resource.prlimit(pid, limit, (1 << 20, 1 << 20)); print(limit)
    except (ValueError, PermissionError): pass
",
    );
    assert_eq!(raised, "");
    let (file, roots) = (place.file("file", CALLER, &both()), place.file("roots", 0, &both()));
    assert!(client.open(place.connection(), roots.as_fd()).is_err());
    // It receives no descriptor, so it registers none.
    assert!(client.open(place.connection(), file.as_fd()).is_err());
}

#[test]
fn a_false_proc_is_noticed() {
    let (ours, theirs) = passthrough::pair().unwrap();
    let mut shell = Command::new("unshare");
    let script = "mount -t tmpfs none /proc && mkdir -p /proc/self/task/1 /proc/self/fdinfo && : >/proc/self/mountinfo
        exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$0\"";
    shell.args(["--mount", "sh", "-c", script]).arg(program()).stdin(Stdio::from(theirs));
    assert!(fails(&mut shell).contains("/proc is not the kernel's"));
    drop(ours);
}

#[test]
fn the_name_of_a_mount_makes_it_nobody_elses() {
    let (place, (client, _child)) = (Place::new(), helper());
    if !notes(&place.mount).contains("fuse_conn") {
        return; // No connection can be told from another.
    }
    let file = place.file("file", CALLER, &both());
    for name in [" - fuse.x y rw,user_id=65534", "\n40 25 0:52 x", "user_id=65534"] {
        let others = Mount::of(OTHER, &place.path(name));
        let error = client.open(others.session.as_fd(), file.as_fd()).unwrap_err();
        assert!(matches!(error.raw_os_error(), Some(EACCES | libc::EPERM)), "{name:?}: {error}");
    }
    place.honest(&client);
}

#[test]
fn another_users_mount_that_got_the_number_of_an_own_one_is_refused() {
    let (place, (client, _child)) = (Place::new(), helper());
    if !notes(&place.mount).contains("fuse_conn") {
        return; // No connection can be told from another.
    }
    let file = place.file("file", CALLER, &both());
    let first = Mount::of(CALLER, &place.path("first"));
    let number = client.open(first.session.as_fd(), file.as_fd()).unwrap();
    let known = notes(&first);
    drop(first);
    // The kernel gives the lowest free number; tests beside this one take some, too.
    let others: Vec<_> = (0..40).map(|n| Mount::of(OTHER, &place.path(&format!("others{n}")))).collect();
    for mount in others.iter().filter(|mount| notes(mount) == known) {
        // Twice: a refusal is no check.
        for _ in 0..2 {
            assert!(client.open(mount.session.as_fd(), file.as_fd()).is_err());
            assert!(client.close(mount.session.as_fd(), number).is_err());
        }
    }
}

#[test]
fn a_file_whose_server_never_answers_stops_its_own_helper_only() {
    let (place, (client, mut child)) = (Place::new(), helper());
    let mut reference = OpenOptions::new();
    reference.read(true).custom_flags(libc::O_PATH);
    let silent = reference.open(&place.mount.point).unwrap();
    let began = Instant::now();
    assert!(client.open(place.connection(), silent.as_fd()).is_err());
    assert!(began.elapsed() < Duration::from_secs(20));
    place.honest(&helper().0);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn what_was_open_when_it_started_is_closed() {
    let (place, (ours, theirs)) = (Place::new(), passthrough::pair().unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec 7</etc/passwd; exec \"$0\""]).arg(program());
    let mut child = shell.uid(CALLER).gid(CALLER).stdin(Stdio::from(theirs)).spawn().unwrap();
    let client = Client::over(ours).unwrap();
    place.honest(&client);
    for entry in fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap() {
        assert_ne!(fs::read_link(entry.unwrap().path()).unwrap(), Path::new("/etc/passwd"));
    }
    drop(client);
    child.wait().unwrap();
}

#[test]
fn no_more_files_than_the_limit_are_registered_and_only_own_ones_given_up() {
    let (place, (client, mut child)) = (Place::new(), helper());
    assert!(client.close(place.connection(), 1).is_err(), "a number that it did not register");
    let file = place.file("file", CALLER, &both());
    let mut numbers = Vec::new();
    let error = loop {
        match client.open(place.connection(), file.as_fd()) {
            Ok(number) => numbers.push(number),
            Err(error) => break error,
        }
    };
    assert_eq!((numbers.len(), error.raw_os_error()), (4096, Some(libc::EMFILE)));
    client.close(place.connection(), numbers[7]).unwrap();
    assert!(client.close(place.connection(), numbers[7]).is_err(), "given up twice");
    place.honest(&client);
    drop(client);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_helper_that_is_stopped_or_killed_delays_nobody_for_long() {
    let place = Place::new();
    for signal in [libc::SIGSTOP, libc::SIGKILL] {
        let (client, mut child) = helper();
        place.honest(&client);
        // SAFETY: the process is a child that was not waited for.
        unsafe { libc::kill(child.id() as i32, signal) };
        let (file, began) = (place.file("file", CALLER, &both()), Instant::now());
        assert!(client.open(place.connection(), file.as_fd()).is_err());
        assert!(began.elapsed() < Duration::from_secs(20));
        assert!(!client.is_alive());
        let began = Instant::now();
        assert!(client.open(place.connection(), file.as_fd()).is_err());
        assert!(began.elapsed() < Duration::from_secs(1), "only the first one waits");
        let _ = child.kill();
        child.wait().unwrap();
    }
}

#[test]
fn it_has_one_capability_and_shows_nobody_what_it_holds() {
    let (place, (client, child)) = (Place::new(), helper());
    place.honest(&client);
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let of = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("no {name}"));
        line.trim().to_string()
    };
    let admin = format!("{:016x}", 1u64 << 21);
    let ids = format!("{CALLER}\t{CALLER}\t{CALLER}\t{CALLER}");
    assert_eq!([of("CapEff:"), of("CapPrm:")], [admin.clone(), admin]);
    assert_eq!([of("CapInh:"), of("CapAmb:")], ["0000000000000000", "0000000000000000"]);
    assert_eq!([of("Uid:"), of("Gid:")], [ids.clone(), ids]);
    assert_eq!([of("NoNewPrivs:"), of("Seccomp:"), of("Threads:")], ["1", "2", "1"]);
    for what in ["fd", "mem", "environ", "maps", "root/etc"] {
        let path = format!("/proc/{}/{what}", child.id());
        let seen = Command::new("head").args(["-c1", &path]).uid(CALLER).gid(CALLER).output().unwrap();
        let listed = Command::new("ls").arg(&path).uid(CALLER).gid(CALLER).output().unwrap();
        assert!(
            !seen.status.success() && (!listed.status.success() || matches!(what, "mem" | "environ" | "maps")),
            "{what}"
        );
    }
}

#[test]
fn it_does_not_start_where_it_would_be_dangerous_or_useless() {
    let socket = || passthrough::pair().unwrap().1;
    assert!(fails(command(socket()).arg("x").env("X", "y")).contains("takes no arguments"));
    assert!(fails(command(socket()).stdin(Stdio::null())).contains("the daemon starts this program"));
    let datagrams = OwnedFd::from(UnixDatagram::pair().unwrap().0);
    assert!(fails(command(socket()).stdin(datagrams)).contains("the daemon starts this program"));
    let mut two = Command::new("setpriv");
    two.args(["--ruid=65534", "--euid=1001", "--regid=65534", "--clear-groups"]).arg(program()).stdin(socket());
    assert!(fails(&mut two).contains("must not be set-user-id"));
    assert!(fails(command(socket()).uid(0).gid(0)).contains("root needs no helper"));
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let copy = |name: &str, mode: u32| {
        let path = dir.path().join(name);
        copy_program(&path);
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let mut command = Command::new(path);
        command.uid(CALLER).gid(CALLER).stdin(Stdio::from(socket()));
        command
    };
    assert!(fails(&mut copy("setuid", 0o4755)).contains("must not be set-user-id"));
    assert!(fails(&mut copy("plain", 0o755)).contains("no CAP_SYS_ADMIN"));
    assert!(Client::start(&dir.path().join("absent")).is_err());
}

#[test]
fn limits_and_environment_of_the_caller_change_nothing() {
    let place = Place::new();
    let limited = |limit: &str| {
        let (ours, theirs) = passthrough::pair().unwrap();
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("ulimit {limit}; exec \"$0\"")]).arg(program());
        shell.env("LD_PRELOAD", "/nonexistent.so").env("RUST_BACKTRACE", "full").env("MALLOC_CONF", "x:y");
        let child = shell.uid(CALLER).gid(CALLER).stdin(Stdio::from(theirs)).stderr(Stdio::null()).spawn().unwrap();
        (Client::over(ours), child)
    };
    for limit in ["-n 8", "-f 0", "-c unlimited", "-t 5", "-u 1", "-s 256"] {
        let (client, _child) = limited(limit);
        // A file is registered, or the helper does not work. Nothing else can happen.
        let Ok(client) = client else { continue };
        let file = place.file("file", CALLER, &both());
        let _ = client.open(place.connection(), file.as_fd());
        let foreign = place.file("roots", 0, &both());
        assert!(client.open(place.connection(), foreign.as_fd()).is_err(), "ulimit {limit}");
    }
}

#[test]
fn in_a_user_namespace_it_can_do_nothing() {
    let (place, (ours, theirs)) = (Place::new(), passthrough::pair().unwrap());
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--map-root-user", "--"]).arg(program()).stderr(Stdio::null());
    let mut child = unshare.uid(CALLER).gid(CALLER).stdin(Stdio::from(theirs)).spawn().unwrap();
    if let Ok(client) = Client::over(ours) {
        let file = place.file("file", CALLER, &both());
        assert!(client.open(place.connection(), file.as_fd()).is_err());
    }
    let _ = child.kill();
    child.wait().unwrap();
}
