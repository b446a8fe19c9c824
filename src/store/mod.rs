//! The store: tree, objects, stubs, recovery, lock; all durable I/O ([`durable`]).
//!
//! Each commit is one rename. Published files are never modified in place: new content gets a new file. A crash at any
//! instant leaves a store that [`Store::open`] repairs: unfinished work is in `tmp/`, and open finishes or undoes it.

pub mod beneath;
pub mod durable;
pub mod engine;
mod error;
pub mod fence;
mod guide;
pub mod lease;
pub mod locks;
mod marks;
mod name_bytes;
pub mod natural;
pub mod object;
mod objects;
mod parallel;
mod profile;
pub(crate) mod record;
mod release;
mod restores;
pub mod retention;
mod settings;
pub mod shared;
pub mod step_pattern;
#[expect(clippy::module_inception, reason = "the file holds `Store`")]
mod store;
mod stub;
mod transfer;
mod walk;

pub use error::{Damage, Error};
pub use marks::{
    Marks, PIN, PLAIN, PROFILE, RECALLED, has_pin, is_pinned, is_recalled, mark_recalled, profile_mark, recalled_from,
};
pub use name_bytes::{Named, name_bytes, names_bytes};
pub use object::Id;
pub use objects::{Hold, MAX_CHAIN, Merge, Objects, first_of_twins};
pub use parallel::{in_parallel, side_by_side};
pub use profile::{Profile, Profiles};
pub(crate) use release::Fingerprint;
pub use release::{
    Committed, Prepared, StubNote, copy_attributes, copy_but_owner, copy_to_new_bytes, replace_stub, replace_taken,
    sync_replaced,
};
pub use restores::{Lineage, Restores};
pub use settings::{FORMAT, MirrorSettings, Newest, Settings};
pub use store::{DAEMON_LOG, Store, exposed, is_store, store_around};
pub use stub::{MIN_RELEASE_BYTES, STUB_BYTES, Stub};
pub use transfer::{export_file, import_file, part_of, remove_part, write_beside};
pub use walk::{TRASH, files_below, is_trash, open_aside, real};
pub(crate) use walk::{changed_ns, entries, entries_if_any, found_at, modified_ns};
