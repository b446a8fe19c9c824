//! Clusters of weighted points on a line. They are ranges of the points, so that running sums give each mean.

use std::iter::once;

/// Points, ascending.
pub(super) struct Points {
    pub(super) values: Vec<f64>,
    /// Sum of the weights, and of the weighted values, of the points before each one, and of all.
    pub(super) weight: Vec<f64>,
    pub(super) moment: Vec<f64>,
}

impl Points {
    /// `weights`: one for each value.
    pub(super) fn new(values: Vec<f64>, weights: &[f64]) -> Points {
        let running = |parts: &mut dyn Iterator<Item = f64>| {
            let sums = parts.scan(0.0, |sum, part| {
                *sum += part;
                Some(*sum)
            });
            once(0.0).chain(sums).collect()
        };
        let weight = running(&mut weights.iter().copied());
        let moment = running(&mut weights.iter().zip(&values).map(|(weight, value)| weight * value));
        Points { values, weight, moment }
    }

    /// The end of each centroid's range of nearest points, after a 0. Centroids ascend; a point in the middle of two
    /// belongs to the lower one.
    pub(super) fn borders(&self, centroids: &[f64]) -> Vec<usize> {
        let border = |pair: &[f64]| self.values.partition_point(|&value| value <= f64::midpoint(pair[0], pair[1]));
        once(0).chain(centroids.windows(2).map(border)).chain(once(self.values.len())).collect()
    }

    /// The mean of a range; `None` if it has no weight. Rounding in the sums never moves it outside its own points.
    pub(super) fn mean(&self, range: &[usize]) -> Option<f64> {
        let total = self.weight[range[1]] - self.weight[range[0]];
        let mean = (self.moment[range[1]] - self.moment[range[0]]) / total;
        (range[0] < range[1] && total > 0.0).then(|| mean.clamp(self.values[range[0]], self.values[range[1] - 1]))
    }

    /// Moves each centroid to the mean of its range. One that has lost its points stays in place.
    pub(super) fn recentre(&self, centroids: &mut [f64], borders: &[usize]) {
        for (centroid, range) in centroids.iter_mut().zip(borders.windows(2)) {
            *centroid = self.mean(range).unwrap_or(*centroid);
        }
    }
}

/// The stored form of centroids.
pub(super) fn to_f32(centroids: &[f64]) -> Vec<f32> {
    let mut narrow: Vec<f32> = centroids.iter().map(|&c| (c as f32).clamp(f32::MIN, f32::MAX)).collect();
    // Far below f32's normal numbers several may become equal.
    narrow.dedup();
    narrow
}
