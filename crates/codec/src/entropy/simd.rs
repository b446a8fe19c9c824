//! One source for every instruction set: `multiversion!` compiles a function body once for each [`Level`], and the
//! caller picks the machine's best. Only the speed differs. The compiler vectorizes without reordering or contracting
//! floating-point operations, so all versions give the same bits. The tests check that.

/// An instruction set that this machine has. The only way to get one is to ask the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The features that the compiler's target always has; on aarch64 that includes NEON.
    pub const PORTABLE: Level = Level(Kind::Portable);

    /// The machine's best level. Cheap: the standard library caches the answer.
    #[inline]
    pub fn detect() -> Level {
        #[cfg(target_arch = "x86_64")]
        {
            if has_avx512() {
                return Level(Kind::Avx512);
            }
            if has_avx2() {
                return Level(Kind::Avx2);
            }
        }
        Level::PORTABLE
    }

    /// All levels of this machine, for tests that compare them.
    pub fn available() -> Vec<Level> {
        let mut levels = vec![Level::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            if has_avx2() {
                levels.push(Level(Kind::Avx2));
            }
            if has_avx512() {
                levels.push(Level(Kind::Avx512));
            }
        }
        levels
    }

    /// True if the AVX2 version may run.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub fn is_avx2(self) -> bool {
        self.0 == Kind::Avx2
    }

    /// True if the AVX-512 version may run.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub fn is_avx512(self) -> bool {
        self.0 == Kind::Avx512
    }
}

// These two must ask for every feature that `multiversion!` enables.

#[cfg(target_arch = "x86_64")]
#[inline]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("lzcnt")
        && is_x86_feature_detected!("popcnt")
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Defines a function whose first parameter is a [`Level`] and whose body is compiled for each level.
#[macro_export]
macro_rules! multiversion {
    (
        $(#[$attr:meta])*
        $vis:vis fn $name:ident $(<$($g:ident: $bound:path),+>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?
        $body:block
    ) => {
        $(#[$attr])*
        $vis fn $name $(<$($g: $bound),+>)? (
            level: $crate::entropy::simd::Level,
            $($arg: $ty),*
        ) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
                fn avx2 $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                    body $(::<$($g),+>)? ($($arg),*)
                }
                #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512 $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                    body $(::<$($g),+>)? ($($arg),*)
                }
                if level.is_avx512() {
                    // SAFETY: a `Level` exists only after the processor confirmed each feature that is enabled.
                    return unsafe { avx512 $(::<$($g),+>)? ($($arg),*) };
                }
                if level.is_avx2() {
                    // SAFETY: as above.
                    return unsafe { avx2 $(::<$($g),+>)? ($($arg),*) };
                }
            }
            let _ = level;
            body $(::<$($g),+>)? ($($arg),*)
        }
    };
}

multiversion! {
    /// The positions of the symbols outside the window that begins at `first`. Fewer than 4 Gi symbols.
    pub(crate) fn places_outside(symbols: &[u8], first: u8, window: u8) -> Vec<u32> {
        let mut places = Vec::new();
        let (chunks, tail) = symbols.as_chunks::<64>();
        for (number, chunk) in chunks.iter().enumerate() {
            let most = chunk.iter().fold(0, |most, &s| s.wrapping_sub(first).max(most));
            if most >= window {
                push_places(mask_of(|at| chunk[at].wrapping_sub(first) >= window), number * 64, &mut places);
            }
        }
        let is_outside = |symbol: u8| symbol.wrapping_sub(first) >= window;
        let mask = tail.iter().rev().fold(0, |mask, &symbol| mask << 1 | u64::from(is_outside(symbol)));
        push_places(mask, chunks.len() * 64, &mut places);
        places
    }
}

/// One bit for each of 64 conditions, the first lowest. The compiler computes the conditions side by side; then one
/// multiplication gathers eight of them.
#[inline(always)]
fn mask_of(condition: impl Fn(usize) -> bool) -> u64 {
    /// Moves the lowest bit of byte i to bit 56 + i.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let mut conditions = [0u8; 64];
    for (at, found) in conditions.iter_mut().enumerate() {
        *found = u8::from(condition(at));
    }
    let gathered = |eight: &[u8; 8]| u64::from_le_bytes(*eight).wrapping_mul(GATHER) >> 56;
    conditions.as_chunks().0.iter().rev().fold(0, |mask, eight| mask << 8 | gathered(eight))
}

/// Appends the places of the set bits, counted from `start`.
#[inline(always)]
fn push_places(mut mask: u64, start: usize, places: &mut Vec<u32>) {
    places.reserve(mask.count_ones() as usize);
    while mask != 0 {
        places.push(start as u32 + mask.trailing_zeros());
        mask &= mask - 1;
    }
}

pub use crate::multiversion;
