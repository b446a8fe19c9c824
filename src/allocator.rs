//! The program's allocator: jemalloc, since a daemon runs for weeks. It allocates and frees large pieces all the time,
//! and small ones that stay in between. In the system's allocator both share heaps, which fragment more and more. Under
//! `scripts/soak.sh` a daemon's heap grew by 7 MB in an hour although its used memory did not. jemalloc keeps sizes
//! apart. Benchmarks of the program take it from here.

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// - Two arenas, the usual number of busy cores. By default there are four per core, and one cannot use the free memory
///   of another.
/// - Each thread keeps eight pieces of a size at hand, up to 1 MiB: those of two tiles. With none, archiving costs a
///   third more.
/// - Free memory goes back to the system after a second, also in an idle daemon.
/// - By default, pieces of 8 MiB and more would go back at once.
/// - Huge pages, where Linux gives them on request: a page fault for 2 MiB instead of 512. Reading back takes a third
///   less time with them, a cold read a tenth, and the daemon has 5 to 20 MB more.
// SAFETY: jemalloc reads this name before it serves anything: a pointer to words that end with a zero.
#[unsafe(export_name = "_rjem_malloc_conf")]
#[used]
static SETTINGS: &[u8; 143] =
    b"narenas:2,tcache_max:1048576,tcache_nslots_large:8,dirty_decay_ms:1000,muzzy_decay_ms:0,oversize_threshold:0,\
      background_thread:true,thp:always\0";
