use super::super::conformance::{Made, Noise, checkpoint, conforms};
use super::*;
use proptest::prelude::*;

fn system(bits: u32) -> CheckNRun {
    CheckNRun { bits, method: None, policy: Policy::Intermittent }
}

const METHODS: [Method; 3] =
    [Method::Symmetric, Method::Asymmetric, Method::Adaptive(Search { bins: 25, percent: 100 })];

#[test]
fn all_conform() {
    for bits in [2, 3, 4, 8] {
        for method in METHODS {
            conforms(&CheckNRun { method: Some(method), ..system(bits) });
        }
    }
    // One with a profile of each checkpoint, one without.
    conforms(&system(3));
    conforms(&system(8));
}

proptest! {
    /// The error model: half a step if the range is the row's own, and the search is never worse.
    #[test]
    fn errors_are_within_half_a_step(
        row in prop::collection::vec(-100f32..100.0, 1..300),
        bits in prop::sample::select(vec![2u32, 3, 4, 8]),
    ) {
        for method in METHODS {
            let grid = quantizer::grids(method, bits, &row, &[row.len()])[0];
            let (codes, values) = quantize::quantized(grid, quantizer::levels(bits), &row);
            let mut again = vec![0.0; row.len()];
            quantize::dequantize(grid, &codes, &mut again);
            prop_assert_eq!(&again, &values);
            prop_assert!(codes.iter().all(|&code| u32::from(code) <= quantizer::levels(bits)));
            if !matches!(method, Method::Adaptive(_)) {
                let largest = row.iter().zip(&values).map(|(x, q)| (x - q).abs()).fold(0.0, f32::max);
                prop_assert!(largest <= grid.scale * 0.5001 + 1e-4, "{largest} {}", grid.scale);
            }
        }
        let [_, plain, adaptive] = METHODS.map(|method| quantizer::l2_error(method, bits, &row, &[row.len()]));
        prop_assert!(adaptive <= plain * 1.0001 + 1e-4, "{adaptive} {plain}");
    }
}

/// The figures use the same values that a mount would store.
#[test]
fn quantized_rows_are_what_the_system_decodes_to() {
    let mut noise = Noise(5);
    // Ten rows are a tile, so none is cut.
    let (width, rows) = (20, 50);
    let values: Vec<f32> = (0..width * rows).map(|_| noise.normal()).collect();
    for (bits, method) in [2, 3, 4, 8].into_iter().flat_map(|bits| METHODS.map(|method| (bits, method))) {
        let made = Made::new("embedding", rows as u64, values.clone());
        let states = checkpoint(&CheckNRun { method: Some(method), ..system(bits) }, std::slice::from_ref(&made), 0);
        let stored: Vec<f32> = states[0].0.iter().flat_map(|state| state.values.iter().copied()).collect();
        assert_eq!(quantized(method, bits, &values, &vec![width; rows]), stored, "{bits} bits, {method:?}");
    }
}

/// The greedy search, value by value in f64 and directly from the paper, finds the same range.
#[test]
fn search_is_the_papers() {
    let mut noise = Noise(3);
    for case in 0..40 {
        let row: Vec<f32> = (0..16 + case * 5).map(|_| noise.normal().powi(3)).collect();
        for bits in [2, 3, 4] {
            let search = Search { bins: 20, percent: 60 };
            let found = quantizer::l2_error(Method::Adaptive(search), bits, &row, &[row.len()]);
            let levels = f64::from(quantizer::levels(bits));
            let error = |min: f64, max: f64| {
                let scale = (max - min) / levels;
                let one = |&x: &f32| {
                    let code = ((f64::from(x).clamp(min, max) - min) / scale).round_ties_even();
                    (f64::from(x) - (min + scale * code)).powi(2)
                };
                row.iter().map(one).sum::<f64>().sqrt()
            };
            let mut min = f64::from(row.iter().copied().fold(f32::MAX, f32::min));
            let mut max = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
            let step = (max - min) / 20.0;
            let mut best = error(min, max);
            for _ in 0..12 {
                let (up, down) = (error(min + step, max), error(min, max - step));
                if up < down {
                    min += step
                } else {
                    max -= step
                }
                best = best.min(up.min(down));
            }
            assert!((found / best - 1.0).abs() < 1e-3, "{found} {best}");
        }
    }
}

/// The result of figures 9 to 11: asymmetric beats symmetric on asymmetric rows, and adaptive beats both with few bits.
#[test]
fn methods_rank_as_published() {
    let mut noise = Noise(4);
    let one = |_| 0.01 * noise.normal() + if noise.below(40) == 0 { 0.05 } else { 0.01 };
    let rows = profile::Sample { values: (0..50 * 64).map(one).collect(), lengths: vec![64; 50], ..Default::default() };
    for bits in [2, 3, 4] {
        let mean = |method| quantizer::l2_error(method, bits, &rows.values, &rows.lengths);
        let [symmetric, asymmetric, adaptive] = METHODS.map(mean);
        assert!(asymmetric < 0.95 * symmetric && adaptive < 0.95 * asymmetric, "{symmetric} {asymmetric} {adaptive}");
        let chosen = profile::choose(bits, &rows);
        let profiled = mean(Method::Adaptive(chosen));
        assert!(profiled < asymmetric - 0.9 * (asymmetric - adaptive), "{chosen:?}");
    }
    // Nothing to gain, nothing to search.
    let pairs = profile::Sample {
        values: (0..20).map(|i| (i % 2) as f32).collect(),
        lengths: vec![2; 10],
        ..Default::default()
    };
    assert_eq!(profile::choose(4, &pairs), Search::published(4));
}

#[test]
fn rows_left_alone_cost_a_flag() {
    let mut noise = Noise(6);
    let mut table = Made { tile: 10_000, ..Made::layer("emb", 500, 32, &mut noise) };
    let first = checkpoint(&system(4), std::slice::from_ref(&table), 0).remove(0);
    // Half a byte each, a scale and a zero point.
    let full = 500 * (16 + 8);
    assert!((full..full + 40).contains(&first.1), "{}", first.1);
    table.previous = Some(first.0);
    let same = checkpoint(&system(4), std::slice::from_ref(&table), 1).remove(0);
    assert!(same.1 < 30, "{}", same.1);
    for row in [3, 77, 400] {
        table.values[row * 32..(row + 1) * 32].iter_mut().for_each(|x| *x += 0.01 * noise.normal());
    }
    let few = checkpoint(&system(4), std::slice::from_ref(&table), 1).remove(0);
    assert!((3 * 24..3 * 24 + 60).contains(&few.1), "{}", few.1);
    // A full baseline is a state written without a base state.
    table.previous = None;
    assert!((full..full + 40).contains(&checkpoint(&system(4), std::slice::from_ref(&table), 2).remove(0).1));
}

/// A profile of other values finds other parameters. Unchanged rows must not be stored again for that.
#[test]
fn a_chain_keeps_its_parameters() {
    let mut noise = Noise(7);
    let mut others = 0;
    for bits in [2, 3, 4] {
        let mut table = Made { tile: 40_000, ..Made::layer("emb", 2000, 32, &mut noise) };
        let first = checkpoint(&system(bits), std::slice::from_ref(&table), 0).remove(0);
        let parameters = |table: &Made| format!("{:?}", system(bits).fit(&[table], 0).unwrap());
        let before = parameters(&table);
        // Half of the rows get a very different distribution.
        for row in table.values.chunks_mut(32).step_by(2) {
            row.iter_mut().for_each(|x| *x = noise.normal().powi(5));
        }
        others += usize::from(parameters(&table) != before);
        table.previous = Some(first.0);
        assert_eq!(parameters(&table), before);
        let next = checkpoint(&system(bits), std::slice::from_ref(&table), 1).remove(0);
        assert!(next.1 < first.1 * 11 / 20, "{} {}", next.1, first.1);
    }
    assert!(others > 0);
}

#[test]
fn rows_cover_a_tile() {
    for (first, width, elements) in
        [(0, 7, 30), (5, 7, 30), (6, 7, 1), (14, 7, 3), (3, 1, 4), (9, u64::MAX, 12), (0, 0, 0)]
    {
        let lengths = row_lengths(first, width, elements);
        assert_eq!(lengths.iter().sum::<usize>(), elements);
        let mut place = first;
        for length in lengths {
            assert!(place == first || place % width == 0);
            assert!((place % width) + length as u64 <= width);
            place += length as u64;
        }
    }
}

/// Figure 15: with rows that grow as published, a new baseline comes at about the eighth interval.
#[test]
fn intermittent_follows_its_predictor() {
    // Rows touched i intervals after a baseline.
    let sizes: Vec<f64> = (1..30).map(|i| 0.27 * f64::from(i).powf(0.35)).collect();
    let full = (0..30).find(|&i| wants_baseline(&sizes[..i])).unwrap();
    assert!((5..=13).contains(&full), "{full}");
    let (sum, last) = (1.0 + sizes[..full].iter().sum::<f64>(), sizes[full - 1]);
    assert!(sum <= (full + 1) as f64 * last);
}

#[test]
fn bits_follow_restores() {
    assert_eq!([0, 1, 2, 3, 4, 20, 21, 500].map(bits_for), [2, 2, 3, 3, 4, 4, 8, 8]);
    assert_eq!([bits_after(1, 1), bits_after(1, 2), bits_after(20, 20), bits_after(3, 4)], [2, 8, 4, 8]);
}

#[test]
fn a_new_baseline_is_made_when_differences_have_grown() {
    let first = |sizes: &[f64]| (0..=sizes.len()).find(|count| wants_baseline(&sizes[..*count]));
    // As in Check-N-Run's figure 15: from a quarter of the model to nearly half of it.
    assert_eq!(first(&[0.25, 0.32, 0.37, 0.41, 0.44, 0.47, 0.49]), Some(6));
    // 1 + .1 n (n + 1) / 2 <= (n + 1) .1 n from the first n with n (n + 1) >= 20 on.
    assert_eq!(first(&(1..=20).map(|n| 0.1 * f64::from(n)).collect::<Vec<_>>()), Some(4));
    // Constant sizes never demand a baseline, and neither does no size.
    assert_eq!(first(&[0.3; 100]), None);
}
