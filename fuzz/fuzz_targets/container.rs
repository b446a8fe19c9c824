#![no_main]
libfuzzer_sys::fuzz_target!(|input: &[u8]| stepfs_fuzz::run("container", input));
