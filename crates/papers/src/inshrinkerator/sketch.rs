//! The logarithmic histogram for quantiles and clusters (section 4.3, after DDSketch). Bucket i holds the magnitudes
//! above gamma^(i-1) up to gamma^i, gamma = 1.01 / .99, so that 2 gamma^i / (gamma + 1) is within 1% of each. Unlike in
//! DDSketch, buckets are never merged: f32 has some 9600 of them.
//!
//! The bounds are powers computed by multiplication, and comparisons with them decide a value's bucket. This needs no
//! logarithm and gives the same histogram on every machine.

use std::sync::LazyLock;

/// Relative error.
const ALPHA: f64 = 0.01;
const GAMMA: f64 = (1.0 + ALPHA) / (1.0 - ALPHA);

/// Number of the first bucket: the smallest magnitude of f32, 1.4e-45, is above gamma^-5163.
const FIRST: i32 = -5163;
/// Buckets: the largest magnitude, 3.4e38, is below gamma^4436.
const BUCKETS: usize = (4436 - FIRST + 1) as usize;

/// Finds buckets; [`BUCKET`] is the only one.
pub(super) struct Buckets {
    /// Upper bound of each bucket.
    upper: Vec<f64>,
    /// Binary logarithm of each leading eight bits of a mantissa, in 2^-16: for a first guess.
    mantissa: [u32; 256],
    per_octave: f64,
}

/// Look it up once for many values.
pub(super) static BUCKET: LazyLock<Buckets> = LazyLock::new(|| {
    let mut upper = vec![1.0; BUCKETS];
    let zero = (-FIRST) as usize;
    for i in zero + 1..BUCKETS {
        upper[i] = upper[i - 1] * GAMMA;
    }
    for i in (0..zero).rev() {
        upper[i] = upper[i + 1] / GAMMA;
    }
    let mantissa = std::array::from_fn(|i| ((1.0 + (i as f64 + 0.5) / 256.0).log2() * 65536.0) as u32);
    Buckets { upper, mantissa, per_octave: 1.0 / (65536.0 * GAMMA.log2()) }
});

impl Buckets {
    /// The bucket of a magnitude that is finite and above zero.
    #[inline(always)]
    pub(super) fn of(&self, magnitude: f32) -> usize {
        let wide = f64::from(magnitude);
        // In f64 no f32 is subnormal.
        let bits = wide.to_bits();
        let octaves = (((bits >> 52) as i64 - 1023) << 16) + i64::from(self.mantissa[(bits >> 44 & 255) as usize]);
        // Rounded up, like bucket numbers. Before that, it is at most a tenth of a bucket off.
        let guess = (octaves as f64 * self.per_octave - f64::from(FIRST)) as usize + 1;
        let guess = guess.clamp(1, BUCKETS - 2);
        // The bounds decide.
        let guess = guess + usize::from(wide > self.upper[guess]);
        guess - usize::from(wide <= self.upper[guess - 1])
    }

    /// The value that represents the magnitudes of a bucket.
    pub(super) fn value(&self, bucket: usize) -> f64 {
        self.upper[bucket] * (2.0 / (GAMMA + 1.0))
    }
}

/// The number of values in each bucket; mergeable.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sketch {
    zeros: u64,
    counts: Vec<u64>,
}

impl Default for Sketch {
    fn default() -> Sketch {
        Sketch { zeros: 0, counts: vec![0; BUCKETS] }
    }
}

impl Sketch {
    /// Counts magnitudes; skips those that are not finite.
    pub(super) fn add(&mut self, magnitudes: impl Iterator<Item = f32>) {
        let buckets = &*BUCKET;
        for magnitude in magnitudes {
            if magnitude > 0.0 && magnitude < f32::INFINITY {
                self.counts[buckets.of(magnitude)] += 1;
            } else if magnitude == 0.0 {
                self.zeros += 1;
            }
        }
    }

    /// Adds another sketch's counts, of another shard or layer.
    pub(super) fn merge(&mut self, other: &Sketch) {
        self.zeros += other.zeros;
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, other)| *count += other);
    }

    /// Number of values.
    pub(super) fn len(&self) -> u64 {
        self.zeros + self.counts.iter().sum::<u64>()
    }

    /// The quantile `q` (0 to 1), within 1% of the value of rank floor(q (n - 1)); `None` for no values.
    pub(super) fn quantile(&self, q: f64) -> Option<f64> {
        let rank = (q.clamp(0.0, 1.0) * self.len().checked_sub(1)? as f64) as u64;
        let mut below = self.zeros;
        if rank < below {
            return Some(0.0);
        }
        let reaches = |&count: &u64| {
            below += count;
            rank < below
        };
        self.counts.iter().position(reaches).map(|bucket| BUCKET.value(bucket))
    }
}

/// The histogram of signed values for clustering.
#[derive(Default)]
pub(super) struct Histogram {
    negative: Sketch,
    positive: Sketch,
}

impl Histogram {
    /// Counts values; skips those that are not finite.
    pub(super) fn add(&mut self, values: &[f32]) {
        self.negative.add(values.iter().map(|value| -value));
        self.positive.add(values.iter().copied());
    }

    /// Value and count of each bucket that is not empty, from the smallest value on.
    pub(super) fn points(&self) -> Vec<(f64, u64)> {
        let side = |sketch: &Sketch, sign: f64| -> Vec<(f64, u64)> {
            let counts = sketch.counts.iter().enumerate().filter(|&(_, &count)| count > 0);
            counts.map(|(bucket, &count)| (sign * BUCKET.value(bucket), count)).collect()
        };
        let zero = (self.positive.zeros > 0).then_some((0.0, self.positive.zeros));
        side(&self.negative, -1.0).into_iter().rev().chain(zero).chain(side(&self.positive, 1.0)).collect()
    }
}
