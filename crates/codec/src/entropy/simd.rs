//! One source for every instruction set: `multiversion!` compiles a function body once for each [`Level`], and the
//! caller picks the machine's best. Only the speed differs. The compiler vectorizes without reordering or contracting
//! floating-point operations, so all versions give the same bits. The tests check that.

/// An instruction set that this machine has. The only way to get one is to ask the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Level(u8);

impl Level {
    /// The features that the compiler's target always has; on aarch64 that includes NEON.
    pub const PORTABLE: Level = Level(0);

    /// The machine's best level. Cheap: the standard library caches the answer.
    #[inline]
    pub fn detect() -> Level {
        // These must ask for every feature that `multiversion!` enables.
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt")
        {
            let has_more = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            return Level(if has_more { 2 } else { 1 });
        }
        Level::PORTABLE
    }

    /// All levels of this machine, for tests that compare them.
    pub fn available() -> Vec<Level> {
        (0..=Level::detect().0).map(Level).collect()
    }

    /// True if the AVX2 version may run.
    #[inline]
    pub fn has_avx2(self) -> bool {
        self.0 >= 1
    }

    /// True if the AVX-512 version may run.
    #[inline]
    pub fn has_avx512(self) -> bool {
        self.0 >= 2
    }
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
                if level.has_avx512() {
                    // SAFETY: a `Level` exists only after the processor confirmed each feature that is enabled.
                    return unsafe { avx512 $(::<$($g),+>)? ($($arg),*) };
                }
                if level.has_avx2() {
                    // SAFETY: as above.
                    return unsafe { avx2 $(::<$($g),+>)? ($($arg),*) };
                }
            }
            let _ = level;
            body $(::<$($g),+>)? ($($arg),*)
        }
    };
}

pub use crate::multiversion;
