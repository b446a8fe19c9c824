//! One function for each fuzz target: it takes any bytes, and panics when a promise is broken. A reader of a store must
//! return an error or the right answer for any bytes. A round trip must give the same values back.
//!
//! Shared by the fuzzer and, through `tests/corruption/`, by the tests.

mod bundle;
mod codecs;
mod containers;
mod entropy;
mod input;
mod names;
mod objects;
mod published;
mod records;
mod settings;
mod store;

/// The action of a target on one input.
pub(crate) type Target = fn(&[u8]);

/// All targets by name.
pub(crate) const TARGETS: &[(&str, Target)] = &[
    ("container", containers::container),
    ("pickle", containers::pickle),
    ("dcp_metadata", containers::dcp_metadata),
    ("npz", containers::npz),
    ("hdf5", containers::hdf5),
    ("bundle", bundle::bundle),
    ("nested", containers::nested),
    ("safetensors", containers::safetensors),
    ("safetensors_header", containers::safetensors_header),
    ("elasticdl_model", containers::elasticdl_model),
    ("entropy_decode", entropy::decode),
    ("entropy_round_trip", entropy::round_trip),
    ("lattice_decode", codecs::lattice_decode),
    ("rows_decode", codecs::rows_decode),
    ("log_decode", codecs::log_decode),
    ("moment_decode", codecs::moment_decode),
    ("lossless_decode", codecs::lossless_decode),
    ("codec_round_trip", codecs::round_trip),
    ("published_decode", published::decode),
    ("published_round_trip", published::round_trip),
    ("object_header", objects::header),
    ("object_index", objects::index),
    ("object_file", objects::file),
    ("object_chain", objects::chain),
    ("stub", records::stub),
    ("note", records::note),
    ("directory", records::directory),
    ("restores", records::restores),
    ("settings", settings::text),
    ("profile_name", settings::profile_name),
    ("retention", settings::retention),
    ("names", names::names),
    ("store", store::operations),
];
