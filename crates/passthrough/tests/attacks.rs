//! Attacks on the helper. Each is refused or harmless, and an honest request succeeds beside it. They need root, which
//! makes the users, and FUSE with passthrough (Linux 6.9).

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use fuser::{Config, Filesystem, InitFlags, KernelConfig, Request, Session, SessionACL};
use passthrough::Client;
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
    if fs::read_to_string(format!("/proc/self/fdinfo/{}", place.connection().as_raw_fd()))
        .unwrap()
        .contains("fuse_conn")
    {
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
    let mut answer = [0; 64];
    let mut stream = File::from(ours.try_clone().unwrap());
    assert_eq!(stream.read(&mut answer).unwrap(), 4);
    let file = place.file("file", CALLER, &both());
    let (connection, fd) = (place.connection(), file.as_fd());
    let open: &[u8] = &[0; 5];
    let long = [0; 4096];
    let tries: [(&[u8], &[BorrowedFd<'_>]); 9] = [
        (&[0], &[connection, fd]),
        (&long, &[connection, fd]),
        (open, &[]),
        (open, &[connection]),
        (open, &[connection, fd, fd]),
        (open, &[fd; 40]),
        (&[7, 0, 0, 0, 0], &[connection, fd]),
        (&[1, 0, 0, 0, 0], &[]),
        (&[1, 0, 0, 0, 0], &[connection, fd]),
    ];
    for (bytes, descriptors) in tries {
        let mut space = vec![MaybeUninit::uninit(); 1024];
        let mut extra = SendAncillaryBuffer::new(&mut space);
        extra.push(SendAncillaryMessage::ScmRights(descriptors));
        sendmsg(&ours, &[IoSlice::new(bytes)], &mut extra, SendFlags::empty()).unwrap();
        assert_eq!(stream.read(&mut answer).unwrap(), 4);
        assert_eq!(i32::from_le_bytes(answer[..4].try_into().unwrap()), -libc::EINVAL, "{} bytes", bytes.len());
    }
    // Swapped descriptors: the file is no connection.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut extra = SendAncillaryBuffer::new(&mut space);
    let swapped = [fd, connection];
    extra.push(SendAncillaryMessage::ScmRights(&swapped));
    sendmsg(&ours, &[IoSlice::new(open)], &mut extra, SendFlags::empty()).unwrap();
    assert_eq!(stream.read(&mut answer).unwrap(), 4);
    assert_eq!(i32::from_le_bytes(answer[..4].try_into().unwrap()), -EACCES);
    let held = fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap().count();
    assert!(held <= 6, "{held} descriptors are kept");
    drop((ours, stream));
    assert!(child.wait().unwrap().success(), "it ends with its socket");
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
