//! Weighted k-means on a histogram's buckets (section 4.4, algorithms 2 and 3).
//!
//! A bucket's weight is alpha times its share of the values plus 1 - alpha times its share of the sum of the buckets'
//! magnitudes. By frequency alone, all resolution would go to the values around zero. The available text lacks the
//! paper's alpha; .5 works well. It does not define the normalization of the two shares either: here both sum to 1.

use super::super::clusters::Points;

/// Maximum rounds of Lloyd's algorithm; on a line they settle in some tens.
const ROUNDS: usize = 300;
/// Seed of the start, always the same: the same checkpoint gives the same clusters.
const SEED: u64 = 0x5eed_0f1a_2b3c_4d5e;

/// Weights for points (value, count).
pub fn weights(points: &[(f64, u64)], alpha: f64) -> Vec<f64> {
    let values: f64 = points.iter().map(|&(_, count)| count as f64).sum();
    let magnitudes: f64 = points.iter().map(|&(value, _)| value.abs()).sum();
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let one = |&(value, count): &(f64, u64)| {
        alpha * share(count as f64, values) + (1.0 - alpha) * share(value.abs(), magnitudes)
    };
    points.iter().map(one).collect()
}

/// Centroids of at most `k` clusters, ascending; fewer if there are fewer points. `points` ascend, with one weight
/// each.
pub fn cluster(points: &[(f64, u64)], weights: &[f64], k: usize) -> Vec<f64> {
    let points = Points::new(points.iter().map(|&(value, _)| value).collect(), weights);
    if points.values.len() <= k {
        return points.values;
    }
    let mut centroids = start(&points.values, weights, k);
    centroids.sort_by(f64::total_cmp);
    let mut borders = Vec::new();
    for _ in 0..ROUNDS {
        let next = points.borders(&centroids);
        if next == borders {
            break;
        }
        points.recentre(&mut centroids, &next);
        borders = next;
    }
    centroids
}

/// The k-means++ start: each centroid is a point, drawn with its weight times its squared distance to the nearest drawn
/// one.
fn start(values: &[f64], weights: &[f64], k: usize) -> Vec<f64> {
    let mut state = SEED;
    let mut draw = |chances: &[f64]| {
        // splitmix64; the top 53 bits are a fraction.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let fraction = ((z ^ z >> 31) >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = fraction * chances.iter().sum::<f64>();
        let found = chances.iter().position(|&chance| {
            left -= chance;
            left < 0.0
        });
        found.or_else(|| chances.iter().rposition(|&chance| chance > 0.0))
    };
    let mut nearest = vec![f64::INFINITY; values.len()];
    let mut centroids: Vec<f64> = Vec::with_capacity(k);
    let mut chances = weights.to_vec();
    while centroids.len() < k {
        // If every point with weight coincides with a drawn one, more centroids gain nothing.
        let Some(drawn) = draw(&chances) else { break };
        let centroid = values[drawn];
        centroids.push(centroid);
        for ((chance, nearest), (&value, &weight)) in
            chances.iter_mut().zip(&mut nearest).zip(values.iter().zip(weights))
        {
            *nearest = nearest.min((value - centroid).abs());
            *chance = weight * *nearest * *nearest;
        }
    }
    centroids
}
