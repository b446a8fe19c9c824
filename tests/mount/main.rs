//! Stores that are mounted in this process: programs use the mount, and most tests do the same in a plain directory beside
//! it. They wait for the kernel and for the archive more than they compute, so `scripts/test.sh` runs several per core.

#[path = "../at_rest/series.rs"]
#[allow(dead_code, unreachable_pub)]
mod series;
#[path = "../support/mod.rs"]
mod support;

/// Each test with passthrough and without.
macro_rules! both {
    ($(fn $name:ident($passthrough:ident) $body:block)*) => {
        mod passthrough { $( #[test] fn $name() { super::$name(true); } )* }
        mod daemon { $( #[test] fn $name() { super::$name(false); } )* }
        $( fn $name($passthrough: bool) $body )*
    };
}

mod durable;
mod lifetime;
mod posix;
mod profiles;
mod recalled;
mod released;
mod retention;
mod room;
mod security;
mod slow;
mod suites;
mod trash;
