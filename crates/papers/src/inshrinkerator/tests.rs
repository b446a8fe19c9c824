use std::collections::BTreeSet;

use super::super::conformance::{Made, Noise, checkpoint, conforms, model};
use super::search::{Space, search};
use super::sketch::Sketch;
use super::*;
use proptest::prelude::*;

fn system(bins: u16) -> Inshrinkerator {
    Inshrinkerator::new(Config::new(bins))
}

#[test]
fn all_conform() {
    conforms(&system(32));
    conforms(&system(4).with_coding(Coding::Huffman));
    conforms(&system(6).with_coding(Coding::RunLength));
    let wild = Config { bins: 239, embedding_bins: 2, prune: 5000, metric: Metric::Sensitivity, protect: 2000 };
    conforms(&Inshrinkerator::new(wild));
    let all = [Config { prune: WHOLE, ..Config::new(2) }, Config { protect: WHOLE, prune: 0, ..Config::new(2) }];
    all.into_iter().for_each(|config| conforms(&Inshrinkerator::new(config)));
    for bad in [Config::new(1), Config::new(240), Config { prune: WHOLE + 1, ..Config::new(4) }] {
        assert!(!bad.is_sound());
    }
}

proptest! {
    #[test]
    fn buckets_are_within_a_hundredth(bits in prop::collection::vec(1u32..0x7f80_0000, 1..50)) {
        let buckets = &*sketch::BUCKET;
        for magnitude in
            bits.into_iter().map(f32::from_bits).chain([f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), 1.0])
        {
            let value = buckets.value(buckets.of(magnitude));
            prop_assert!((value / f64::from(magnitude) - 1.0).abs() <= 0.01 + 1e-9, "{magnitude} {value}");
        }
    }

    #[test]
    fn quantiles_are_within_a_hundredth(mut values in prop::collection::vec(-1e3f32..1e3, 1..300), q in 0f64..=1.0) {
        let mut whole = Sketch::default();
        whole.add(values.iter().map(|v| v.abs()));
        let (mut left, mut right) = (Sketch::default(), Sketch::default());
        left.add(values[..values.len() / 2].iter().map(|v| v.abs()));
        right.add(values[values.len() / 2..].iter().map(|v| v.abs()));
        left.merge(&right);
        prop_assert_eq!(&left, &whole);
        prop_assert_eq!(whole.len(), values.len() as u64);
        values.iter_mut().for_each(|v| *v = v.abs());
        values.sort_by(f32::total_cmp);
        let exact = f64::from(values[(q * (values.len() - 1) as f64) as usize]);
        prop_assert!((whole.quantile(q).unwrap() - exact).abs() <= 0.010001 * exact);
    }

    /// Levels come back for any previous number of levels, in every kind of coding.
    #[test]
    fn levels_come_back(
        (now, before, seed) in (2usize..60, 2usize..MOST_LEVELS, any::<u64>()),
        len in 0usize..3000,
        moving in 1usize..40,
    ) {
        let mut noise = Noise(seed);
        let then: Vec<u16> = (0..len).map(|_| noise.below(before) as u16).collect();
        let levels: Vec<u16> = then
            .iter()
            .map(|&level| if noise.below(moving) == 0 { noise.below(now) as u16 } else { level.min(now as u16 - 1) })
            .collect();
        let then = State { bins: Some(then), ..State::default() };
        for before in [None, Some(&then)] {
            for coding in [Coding::Huffman, Coding::RunLength, Coding::Rearranged] {
                let mut payload = Vec::new();
                levels::put(&levels, now, before, coding, &mut payload);
                payload.push(77);
                let mut rest = payload.as_slice();
                prop_assert_eq!(&levels::take(&mut rest, now, before, len).unwrap(), &levels);
                prop_assert_eq!(rest, [77]);
            }
        }
    }

    /// The search finds the same as trying all, if quality improves along each axis.
    #[test]
    fn search_finds_the_smallest(
        harm in prop::array::uniform4(0f64..1.0),
        threshold in 0f64..3.0,
        sensitive in 0.5f64..1.5,
    ) {
        let space = Space::published(0.2);
        let degradation = |config: &Config| {
            let of_metric = if config.metric == Metric::Sensitivity { sensitive } else { 1.0 };
            harm[0] * 8.0 / f64::from(config.bins) * of_metric + harm[1] * 16.0 / f64::from(config.embedding_bins)
                + harm[2] * share(config.prune) + harm[3] * 0.001 / share(config.protect)
        };
        let mut all = Vec::new();
        for &bins in &space.bins {
            for &embedding_bins in &space.embedding_bins {
                for &prune in &space.prune {
                    for &protect in &space.protect {
                        for metric in [Metric::Magnitude, Metric::Sensitivity] {
                            all.push(Config { bins, embedding_bins, prune, metric, protect });
                        }
                    }
                }
            }
        }
        let smallest = all.iter().filter(|c| degradation(c) <= threshold).map(|c| space.bits(c)).min_by(f64::total_cmp);
        // What the search finds, and how many configurations it tries.
        let find = |before: Option<&Config>, worse: f64| {
            let mut tried = 0;
            let found = search(&space, before, threshold, |config| {
                tried += 1;
                Ok::<f64, ()>(worse * degradation(config))
            });
            (found.unwrap(), tried)
        };
        let (found, tried) = find(None, 1.0);
        prop_assert_eq!(found.map(|found| space.bits(&found.config)), smallest);
        prop_assert!(tried < all.len(), "{tried} of {}", all.len());
        let Some(found) = found else { return Ok(()) };
        prop_assert!(found.exhaustive && degradation(&found.config) <= threshold);
        // With more harm from the same configuration, as later in training: the next one is as careful on every axis,
        // or the whole cube is searched again.
        let (next, tried) = find(Some(&found.config), 1.2);
        if let Some(next) = next && !next.exhaustive {
            let (a, b) = (next.config, found.config);
            prop_assert!(a.bins >= b.bins && a.embedding_bins >= b.embedding_bins);
            prop_assert!(a.prune <= b.prune && a.protect >= b.protect);
            prop_assert!(tried <= 18);
        }
        // If nothing has changed, the first trial with its metric wins; the other metric is tried beside it.
        let (same, tried) = find(Some(&found.config), 1.0);
        let same = same.unwrap();
        prop_assert!(!same.exhaustive && degradation(&same.config) <= threshold && tried <= 18);
    }
}

#[test]
fn search_reports_errors_and_impossible_thresholds() {
    let space = Space::published(0.0);
    assert_eq!(search(&space, None, 0.1, |_| Err::<f64, &str>("no")), Err("no"));
    assert_eq!(search(&space, None, 0.1, |_| Ok::<f64, ()>(f64::NAN)), Ok(None));
    let empty = Space { bins: vec![], ..space };
    assert_eq!(search(&empty, None, 0.1, |_| Ok::<f64, ()>(0.0)), Ok(None));
}

/// The loss of the clusters, and the smallest possible loss, by dynamic programming over all borders.
fn losses(points: &[(f64, u64)], weights: &[f64], k: usize) -> (f64, f64) {
    let centroids = kmeans::cluster(points, weights, k);
    assert!(centroids.len() <= k && centroids.is_sorted());
    let nearest = |value: f64| centroids.iter().map(|c| (c - value).powi(2)).fold(f64::INFINITY, f64::min);
    let found: f64 = points.iter().zip(weights).map(|(&(value, _), w)| w * nearest(value)).sum();
    let n = points.len();
    let cost = |from: usize, to: usize| {
        let total: f64 = weights[from..to].iter().sum();
        let mean = (from..to).map(|i| weights[i] * points[i].0).sum::<f64>() / total;
        (from..to).map(|i| weights[i] * (points[i].0 - mean).powi(2)).sum::<f64>()
    };
    let mut least: Vec<f64> = (0..=n).map(|to| if to == 0 { 0.0 } else { cost(0, to) }).collect();
    for _ in 1..k {
        least = (0..=n).map(|to| (0..to).map(|from| least[from] + cost(from, to)).fold(least[to], f64::min)).collect();
    }
    (found, least[n])
}

#[test]
fn clusters_are_near_the_best() {
    let mut noise = Noise(8);
    for case in 0..12 {
        let mut values: Vec<f64> = (0..60).map(|_| f64::from(noise.normal().powi(3))).collect();
        values.sort_by(f64::total_cmp);
        let points: Vec<(f64, u64)> = values.into_iter().map(|value| (value, 1 + noise.bits() % 100)).collect();
        for k in [2, 4, 8, 16] {
            let (found, least) = losses(&points, &kmeans::weights(&points, 0.5), k);
            assert!(found >= least * 0.999 && found <= least * 3.0, "{case} {k}: {found} {least}");
        }
    }
    // As many as there are points, or more: no loss.
    let points = [(-1.0, 5), (0.0, 1), (2.0, 3)];
    assert_eq!(kmeans::cluster(&points, &[1.0; 3], 3), [-1.0, 0.0, 2.0]);
    assert_eq!(kmeans::cluster(&points, &kmeans::weights(&points, 1.0), 8), [-1.0, 0.0, 2.0]);
    assert!(kmeans::cluster(&[], &[], 4).is_empty());
    // All weight on one point.
    assert_eq!(kmeans::cluster(&points, &[0.0, 1.0, 0.0], 2), [0.0]);
}

#[test]
fn shares_are_pruned_and_protected() {
    let mut noise = Noise(2);
    let mut layer = Made { tile: 5000, ..Made::layer("mlp.weight", 100, 200, &mut noise) };
    layer.gradient = Some(layer.values.iter().map(|_| noise.normal()).collect());
    for metric in [Metric::Magnitude, Metric::Sensitivity] {
        let config = Config { prune: 3000, protect: 100, metric, ..Config::new(8) };
        let states = checkpoint(&Inshrinkerator::new(config), std::slice::from_ref(&layer), 0).remove(0).0;
        let levels: Vec<u16> = states.iter().flat_map(|state| state.bins.clone().unwrap()).collect();
        let values: Vec<f32> = states.iter().flat_map(|state| state.values.to_vec()).collect();
        let share = |level: u16| levels.iter().filter(|&&l| l == level).count() as f64 / levels.len() as f64;
        assert!((share(PRUNED) - 0.3).abs() < 0.01, "{}", share(PRUNED));
        // The largest by magnitude and the largest by sensitivity; few are both.
        assert!((0.014..0.022).contains(&share(PROTECTED)), "{}", share(PROTECTED));
        let mut distinct = BTreeSet::new();
        for ((&level, &value), &w) in levels.iter().zip(&values).zip(&layer.values) {
            match level {
                PRUNED => assert_eq!(value, 0.0),
                PROTECTED => assert_eq!(value, w),
                _ => _ = distinct.insert(value.to_bits()),
            }
        }
        assert!(distinct.len() <= 8);
    }
}

#[test]
fn layers_are_told_apart() {
    let of = |name, rows, width: usize| Layer::of(&Made::new(name, rows, vec![0.0; rows as usize * width]));
    assert_eq!(of("transformer.wte.weight", 50, 8), Layer::Embedding);
    assert_eq!(of("model.embed_tokens.weight", 50, 8), Layer::Embedding);
    assert_eq!(of("table_7", 8192, 4), Layer::Embedding);
    assert_eq!(of("h.0.attn.c_attn.weight", 24, 8), Layer::Attention);
    assert_eq!(of("layer1.0.conv2.weight", 24, 9), Layer::Convolution);
    assert_eq!(of("h.0.mlp.c_fc.weight", 24, 8), Layer::Linear);
    assert_eq!(of("embedding.bias", 1, 8), Layer::Vector);
    assert_eq!(layers::slot("optimizer.state.3.exp_avg_sq"), "exp_avg_sq");
    assert_eq!(layers::slot("model.summary.weight"), "");
}

/// Another number of bins at each checkpoint, up and down, as the search makes it.
#[test]
fn bins_may_change() {
    let mut noise = Noise(11);
    let mut tensors = model(&mut noise);
    for (position, bins) in [8, 32, 4, 239, 6].into_iter().enumerate() {
        let states = checkpoint(&system(bins), &tensors, position as u32);
        for (tensor, (states, _)) in tensors.iter_mut().zip(states) {
            assert!(states.iter().all(|state| state.bins.is_some()));
            tensor.previous = Some(states);
            tensor.values.iter_mut().for_each(|w| *w += 0.0005 * noise.normal());
        }
    }
}

/// Figure 12: run lengths beat Huffman alone if little moves, and rearranging beats both if bins move unevenly.
#[test]
fn codings_rank_as_published() {
    let mut noise = Noise(12);
    let then: Vec<u16> = (0..100_000).map(|_| noise.below(34) as u16).collect();
    // Every fifth value of the bins in the middle moves to the next one; of the others one in ten thousand.
    let move_one = |&level: &u16| {
        let often = if (16..20).contains(&level) { 5 } else { 10_000 };
        if noise.below(often) == 0 { (level + 1) % 34 } else { level }
    };
    let now: Vec<u16> = then.iter().map(move_one).collect();
    let then = State { bins: Some(then), ..State::default() };
    let size = |coding| {
        let mut out = Vec::new();
        levels::put(&now, 34, Some(&then), coding, &mut out);
        out.len()
    };
    let [huffman, runs, rearranged] = [Coding::Huffman, Coding::RunLength, Coding::Rearranged].map(size);
    assert!(rearranged * 10 < runs * 9 && rearranged * 10 < huffman * 9, "{huffman} {runs} {rearranged}");
}
