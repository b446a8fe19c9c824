//! One system call after the other, on the mount and on a plain directory: the same answers and the same errnos, except
//! where [`DEVIATIONS`] says otherwise. A deviation that disappears fails the test, as a new one does.
//!
//! The cases run in a process of their own (this program again), which may change its user, its limits and its umask.

mod bytes;
mod marks;
mod names;
mod people;
mod talk;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use super::support::Mounted;
use talk::Talk;

type Case = (&'static str, fn(&mut Talk));

macro_rules! cases {
    ($($module:ident: $($case:ident)*;)*) => {
        const CASES: &[Case] = &[$($((stringify!($case), $module::$case)),*),*];
    };
}

cases! {
    names: every_byte_may_be_in_a_name long_names long_paths dots_and_slashes links_of_both_kinds many_hard_links
        renames_of_everything_over_everything a_whiteout directories_in_use special_files a_device_is_opened
        listing_while_it_changes numbers_of_the_list_are_those_of_stat;
    bytes: flags_of_open a_handle_that_only_refers a_file_that_never_has_a_name offsets_beyond_two_gigabytes
        places_beyond_what_a_file_can_be the_limit_of_file_sizes appending_from_two_sides
        mappings_and_calls_see_each_other direct_io direct_io_that_is_not_aligned fallocate_in_all_its_ways
        ranges_that_move_others copying_in_the_kernel vectors_and_hints an_open_file_without_a_name programs_are_run;
    people: files_of_others files_of_their_own what_strangers_make_is_theirs directories_of_others sticky_directories
        privileges_go_with_a_change opened_for_writing_and_not_written a_set_user_id_program_is_run
        real_and_effective_users;
    marks: times_are_set times_that_move access_times attributes_of_all_kinds the_time_of_birth extended_attributes
        access_control_lists flags_of_files other_requests handles_without_names notifications locks leases holes;
}

/// The deviations of the mount: the beginning of the lines, the modes, and the reason. docs/SEMANTICS.md has them in
/// words.
const DEVIATIONS: &[(&str, Modes, &str)] = &[
    ("a_whiteout: RENAME_WHITEOUT", Modes::Both, "only for layers of an overlay"),
    ("a_device_is_opened: opened", Modes::Both, "mounted nodev"),
    ("a_set_user_id_program_is_run", Modes::Both, "mounted nosuid"),
    ("opened_for_writing_and_not_written: then", Modes::Both, "with passthrough the daemon does not see the write"),
    ("a_file_that_never_has_a_name: O_TMPFILE", Modes::Both, "the FUSE library has no such operation"),
    ("places_beyond_what_a_file_can_be", Modes::Both, "the kernel knows FUSE's limit, not the store's"),
    ("direct_io_that_is_not_aligned: write", Modes::Daemon, "the daemon writes through its page cache"),
    ("ranges_that_move_others: collapse", Modes::Both, "the kernel does not pass them on to FUSE"),
    ("ranges_that_move_others: insert", Modes::Both, "the kernel does not pass them on to FUSE"),
    ("access_times: moved", Modes::Daemon, "what the kernel has cached is read without the store's knowing"),
    ("the_time_of_birth", Modes::Both, "the protocol that the FUSE library speaks has none"),
    ("access_control_lists: set", Modes::Both, "nobody would enforce them"),
    ("flags_of_files: flags", Modes::Both, "immutable files could not be released"),
    ("flags_of_files: xattr", Modes::Both, "immutable files could not be released"),
    ("flags_of_files: version", Modes::Both, "the store's, and changed by a release"),
    ("other_requests: epoll", Modes::Both, "the kernel takes every file of FUSE to be able to wait"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Modes {
    Both,
    Passthrough,
    Daemon,
}

/// Names the directory of the cases, for the process that runs them.
const DIRECTORY: &str = "STEPFS_SYSCALLS_DIRECTORY";

/// Not a test: the other process runs this.
#[test]
#[ignore = "run by the other tests here"]
fn the_cases_themselves() {
    let Some(directory) = std::env::var_os(DIRECTORY).map(PathBuf::from) else {
        return;
    };
    // SAFETY: a number.
    unsafe { libc::umask(0o022) };
    let only = std::env::var("STEPFS_SYSCALLS_CASE").ok();
    let mut lines = String::new();
    for (name, case) in CASES.iter().filter(|(name, _)| only.as_deref().is_none_or(|only| only == *name)) {
        let own = directory.join(name);
        fs::create_dir(&own).unwrap();
        let (mut talk, began) = (Talk::new(own, name), Instant::now());
        case(&mut talk);
        eprintln!("{name}: {:.1} s", began.elapsed().as_secs_f64());
        for line in talk.lines {
            lines.push_str(&line);
            lines.push('\n');
        }
    }
    fs::write(directory.with_extension("said"), lines).unwrap();
}

fn say(directory: &Path) -> Vec<String> {
    fs::create_dir(directory).unwrap();
    let said = directory.with_extension("said");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "syscalls::the_cases_themselves", "--ignored", "--nocapture", "--test-threads=1"])
        .env(DIRECTORY, directory)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::read_to_string(said).unwrap().lines().map(String::from).collect()
}

fn compare(passthrough: bool) {
    let m = Mounted::shared(passthrough);
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(m.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (mounted, plain) = (say(&m.mnt().join("cases")), say(&m.plain().join("cases")));
    let mode = if passthrough { Modes::Passthrough } else { Modes::Daemon };
    let listed = DEVIATIONS.iter().filter(|(_, modes, _)| *modes == Modes::Both || *modes == mode);
    let mut unseen: Vec<&str> = listed.clone().map(|(line, ..)| *line).collect();
    let mut wrong = Vec::new();
    assert!(plain.len() > CASES.len() && mounted.len() == plain.len(), "{} and {} lines", mounted.len(), plain.len());
    for (mounted, plain) in mounted.iter().zip(&plain).filter(|(mounted, plain)| mounted != plain) {
        match listed.clone().find(|(line, ..)| mounted.starts_with(line)) {
            Some((line, ..)) => unseen.retain(|other| other != line),
            None => wrong.push(format!("{mounted}\n   beside it: {plain}")),
        }
    }
    assert!(
        wrong.is_empty(),
        "the mount differs from a plain directory, and no deviation is listed:\n{}",
        wrong.join("\n")
    );
    assert!(unseen.is_empty(), "these deviations are listed, and are none any more: {unseen:#?}");
}

#[test]
fn calls_say_the_same_with_passthrough() {
    compare(true);
}

#[test]
fn calls_say_the_same_without_passthrough() {
    compare(false);
}
