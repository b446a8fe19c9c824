//! fsx on a checkpoint that is released and recalled between bursts.
//!
//! fsx itself holds its file open, and an open file is not released. So this is the same exerciser (reads, writes,
//! mappings, truncation, holes, copies within the file, closing and opening, all compared with bytes in memory) for one
//! file of a lineage. It also reads and writes directly and asynchronously. After each burst the file is closed, and a newer state is saved beside it. The next burst begins
//! after the release: with a read, a recall by hand, or a change that recalls it.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use super::histories::setting;
use super::judge::pattern;
use super::series::Random;
use super::support::{Mounted, state, wait_until};
use super::sys::{self, Map};

/// In the suite; `scripts/posix.sh` asks for 100,000.
const OPERATIONS: u64 = 1500;
/// Operations between two releases.
const BURST: u64 = 150;
/// The file's greatest length, and its least length before a release.
const LONGEST: u64 = 256 * 1024;
const SHORTEST: usize = 80 * 1024;

struct Exerciser {
    path: PathBuf,
    fd: OwnedFd,
    /// The same file with O_DIRECT.
    direct: OwnedFd,
    aio: sys::Aio,
    bytes: Vec<u8>,
    random: Random,
    log: Vec<String>,
}

impl Exerciser {
    fn fail(&self, what: &str) -> ! {
        let last = self.log.len().saturating_sub(30);
        panic!("{what}\nthe last operations:\n{}", self.log[last..].join("\n"))
    }

    fn check<T>(&self, what: &str, result: sys::Sys<T>) -> T {
        result.unwrap_or_else(|code| self.fail(&format!("{what}: errno {code}")))
    }

    fn compare(&self, what: &str, at: usize, found: &[u8]) {
        let end = self.bytes.len().min(at + found.len());
        if self.bytes[at.min(end)..end] != *found {
            let wrong = self.bytes[at..end].iter().zip(found).position(|(a, b)| a != b);
            self.fail(&format!("{what} at {at}: {} bytes, the first difference at {wrong:?}", found.len()));
        }
    }

    fn write(&mut self, at: usize, data: &[u8]) {
        if self.bytes.len() < at + data.len() {
            self.bytes.resize(at + data.len(), 0);
        }
        self.bytes[at..at + data.len()].copy_from_slice(data);
    }

    fn step(&mut self) {
        let at = self.random.below(LONGEST) as usize;
        let len = (self.random.below(16_384) as usize + 1).min(LONGEST as usize - at);
        let inside = at.min(self.bytes.len().saturating_sub(1));
        let within = len.min(self.bytes.len() - inside);
        let what = self.random.below(15);
        self.log.push(format!("{what}: {at} {len} of {}", self.bytes.len()));
        // Bytes that compress: a file that would not become smaller is not released.
        let data = vec![pattern(1, self.random.next() as u8)[0]; len];
        match what {
            0 | 1 => {
                let read = self.check("read", sys::pread(&self.fd, len, at as i64));
                let expected = self.bytes.len().saturating_sub(at).min(len);
                if read.len() != expected {
                    self.fail(&format!("read {} bytes, expected {expected}", read.len()));
                }
                self.compare("read", at, &read);
            }
            2 | 3 => {
                let wrote = self.check("write", sys::pwrite(&self.fd, &data, at as i64));
                assert_eq!(wrote, len as u64);
                self.write(at, &data);
            }
            4 if within > 0 => {
                let map = self.check("map", Map::new(&self.fd, self.bytes.len(), false));
                self.compare("mapped", inside, &map.load(inside, within));
            }
            5 if within > 0 => {
                let map = self.check("map", Map::new(&self.fd, self.bytes.len(), true));
                map.store(inside, &data[..within]);
                if self.random.below(2) == 0 {
                    self.check("msync", map.sync());
                }
                self.write(inside, &data[..within]);
            }
            6 => {
                self.check("truncate", sys::ftruncate(&self.fd, at as i64));
                self.bytes.resize(at, 0);
            }
            7 => {
                let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                self.check("punch", sys::fallocate(&self.fd, punch, at as i64, len as i64));
                let end = self.bytes.len();
                self.bytes[at.min(end)..(at + len).min(end)].fill(0);
            }
            8 => {
                self.check("allocate", sys::fallocate(&self.fd, 0, at as i64, len as i64));
                let end = self.bytes.len().max(at + len);
                self.bytes.resize(end, 0);
            }
            9 => {
                let to = self.random.below(LONGEST - len as u64) as usize;
                let count = len.min(self.bytes.len().saturating_sub(at));
                if to + count <= at || at + count <= to {
                    let copied =
                        self.check("copy", sys::copy_file_range(&self.fd, at as i64, &self.fd, to as i64, len));
                    let data = self.bytes[at.min(self.bytes.len())..][..copied as usize].to_vec();
                    if !data.is_empty() {
                        self.write(to, &data);
                    }
                }
            }
            10 => self.reopen(),
            11 | 12 => {
                let (from, mut blocks) = (at / sys::BLOCK * sys::BLOCK, sys::blocks(&data));
                let got = self.transfer(false, &mut blocks, from);
                let expected = self.bytes.len().saturating_sub(from).min(size_of_val(&*blocks));
                if got != expected as u64 {
                    self.fail(&format!("read {got} bytes of blocks, expected {expected}"));
                }
                self.compare("blocks", from, &sys::bytes_of(&blocks)[..expected]);
            }
            13 | 14 => {
                let (from, mut blocks) = (at / sys::BLOCK * sys::BLOCK, sys::blocks(&data));
                let wrote = self.transfer(true, &mut blocks, from);
                assert_eq!(wrote, size_of_val(&*blocks) as u64);
                self.write(from, &sys::bytes_of(&blocks));
            }
            _ => {}
        }
        let size = self.check("fstat", sys::fstat(&self.fd)).size;
        if size != self.bytes.len() as u64 {
            self.fail(&format!("is {size} bytes long, expected {}", self.bytes.len()));
        }
    }

    /// Reads or writes blocks: directly or not, asynchronously or not.
    fn transfer(&mut self, write: bool, blocks: &mut [sys::Block], at: usize) -> u64 {
        let (direct, aio) = (self.random.below(3) > 0, self.random.below(2) == 0);
        self.log.push(format!("blocks: write {write}, direct {direct}, asynchronous {aio}"));
        let fd = if direct { &self.direct } else { &self.fd };
        let done = match aio {
            true => self.aio.transfer(fd, write, blocks, at as i64),
            false => sys::transfer(fd, write, blocks, at as i64),
        };
        self.check("blocks", done)
    }

    fn reopen(&mut self) {
        let flags = if self.random.below(3) == 0 { libc::O_RDWR | libc::O_DSYNC } else { libc::O_RDWR };
        self.fd = self.check("open", sys::open(&self.path, flags, 0));
        self.direct = self.check("open", sys::open(&self.path, libc::O_RDWR | libc::O_DIRECT, 0));
    }

    /// Closes it, has it released, and opens it again in one way or another.
    fn released(&mut self, newer: &std::path::Path) {
        if self.bytes.len() < SHORTEST {
            self.check("truncate", sys::ftruncate(&self.fd, SHORTEST as i64));
            self.bytes.resize(SHORTEST, 0);
        }
        // Nothing else may hold it.
        let null = || sys::open(std::path::Path::new("/dev/null"), libc::O_RDONLY, 0).unwrap();
        (self.fd, self.direct) = (null(), null());
        let salt = self.random.next();
        let lines = (0..).flat_map(|i: u32| format!("newer {i} {salt}\n").into_bytes());
        fs::write(newer, lines.take(SHORTEST).collect::<Vec<u8>>()).unwrap();
        let path = self.path.clone();
        wait_until("it is released", || state(&path) == "released");
        let what = self.random.below(4);
        self.log.push(format!("released, then {what}"));
        match what {
            0 => {
                let all = fs::read(&self.path).unwrap();
                self.compare("released", 0, &all);
                self.log.push("read whole".into());
            }
            1 => self.check("recall", sys::setxattr(&self.path, "user.stepfs.recall", b"1", 0)),
            2 => {
                let len = self.random.below(self.bytes.len() as u64) as usize + 1;
                self.check("truncate", sys::truncate(&self.path, len as i64));
                self.bytes.truncate(len);
            }
            _ => {
                // While somebody reads it, in one way or another.
                let reader = self.check("open", sys::open(&self.path, libc::O_RDONLY, 0));
                let part = self.check("read", sys::pread(&reader, 5000, 70_000));
                self.compare("a part", 70_000, &part);
                self.reopen();
                return;
            }
        }
        self.reopen();
    }
}

fn run(passthrough: bool) {
    let operations = setting("STEPFS_FSX_OPERATIONS").unwrap_or(OPERATIONS);
    let m = Mounted::new(passthrough);
    fs::create_dir(m.mnt().join("run")).unwrap();
    let (path, newer) = (m.mnt().join("run/step-1.bin"), m.mnt().join("run/step-2.bin"));
    let fd = sys::open(&path, libc::O_RDWR | libc::O_CREAT, 0o644).unwrap();
    let direct = sys::open(&path, libc::O_RDWR | libc::O_DIRECT, 0).unwrap();
    let random = Random(setting("STEPFS_MODEL_SEED").unwrap_or(7));
    let aio = sys::Aio::new().unwrap();
    let mut exerciser = Exerciser { path, fd, direct, aio, bytes: Vec::new(), random, log: Vec::new() };
    let mut releases = 0;
    for number in 1..=operations {
        exerciser.step();
        if number % BURST == 0 {
            exerciser.released(&newer);
            releases += 1;
        }
    }
    println!("passthrough {passthrough}: {operations} operations, released and recalled {releases} times");
    assert_eq!(releases, operations / BURST);
}

#[test]
fn exercised_between_releases_with_passthrough() {
    run(true);
}

#[test]
fn exercised_between_releases_without_passthrough() {
    run(false);
}
