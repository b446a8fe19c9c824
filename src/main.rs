//! The `stepfs` command.

use std::process::ExitCode;

/// A daemon runs for weeks, takes and frees large pieces all the time, and small ones that stay in between. In the system's
/// allocator both share heaps, which therefore become more and more like a sieve: under `scripts/soak.sh` a daemon's grew by 7 MB in
/// an hour though what was in use did not. jemalloc keeps sizes apart.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// - Two arenas, as many as cores that are busy: by itself it makes four for each core, and what is free in one is of no use to
///   the others.
/// - Each thread keeps eight pieces of a size at hand, up to 1 MiB: those of two tiles. With none, archiving costs a third more.
/// - What is free goes back to the system after a second, also in a daemon that sleeps.
/// - By itself, pieces from 8 MiB on would go back at once.
#[cfg(feature = "jemalloc")]
// SAFETY: jemalloc reads this name before it serves anything: a pointer to words that end with a zero.
#[unsafe(export_name = "_rjem_malloc_conf")]
#[used]
static SETTINGS: &[u8; 132] =
    b"narenas:2,tcache_max:1048576,tcache_nslots_large:8,dirty_decay_ms:1000,muzzy_decay_ms:0,oversize_threshold:0,background_thread:true\0";

fn main() -> ExitCode {
    stepfs::cli::main()
}
