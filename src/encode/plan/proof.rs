//! Decides which tensors may lose anything: trained parameters and their optimizer's state, and nothing else.
//!
//! An optimizer beside a weight proves it (`formats::proof`). Otherwise two successive states do: a large matrix
//! with a layer's name, that moves as training moves parameters. Rewards, observations, masks, statistics and tables
//! fail one of the conditions here. An unproven tensor is lossless, so a wrong "no" costs space only.

use std::collections::{HashMap, HashSet};
use std::io;
use std::slice::from_ref;

use rayon::prelude::*;

use codec::floor::are_finite;
use codec::lattice::{updates, values};
use formats::{Role, Tensor, is_of_layer};

use super::lattice::{SAMPLE_ELEMENTS, mean_square, read, sample};
use super::subject::Material;

/// Smaller tensors are never proven by two states: the shares here would be chance, and lossless costs little.
const LEAST_ELEMENTS: u64 = 4096;
/// Least share of elements of either sign, and of moves in either direction. Parameters have about half of each;
/// variances, probabilities, distances and most data have one sign only.
const LEAST_OF_EACH_SIGN: f64 = 0.05;
/// Most elements that are exactly 0. Masks, one-hot data and pruned matrices have more.
const MOST_ZEROS: f64 = 0.01;
/// Least share of distinct values among the elements of an f32 or f64 tensor. Rounded, counted and repeated data have
/// fewer.
const LEAST_DISTINCT: f64 = 0.5;
/// Least share of elements that move from one state to the next: nearly all parameters of 32 bits do, those of 16
/// bits often stay within their rounding. A buffer of data that is filled further moves in some places only.
const LEAST_MOVED: f64 = 0.5;
const LEAST_MOVED_OF_16_BITS: f64 = 0.02;
/// Largest update, as a share of the weights, both as root mean squares. Between unrelated data it is 1.4.
const MOST_MOVED: f64 = 0.5;
/// An element that moves by this many root mean squares of the weights was replaced, not trained.
const MOST_OF_ONE: f64 = 4.0;

/// For each tensor whether it may be quantized. `twins`: the tensors in the state after this one.
pub(super) fn proven(material: &Material, tensors: &[Tensor], twins: &[Option<Tensor>]) -> io::Result<Vec<bool>> {
    let whole = &material.description.tensors;
    let statistics = Statistics::of(tensors);
    // First moments and momenta, by the index of their parameter.
    let mut states: HashMap<usize, Vec<&Tensor>> = HashMap::new();
    for state in tensors.iter().filter(|state| matches!(state.role, Role::FirstMoment | Role::Momentum)) {
        if let Some(of) = state.of {
            states.entry(of).or_default().push(state);
        }
    }
    let by_itself =
        |(at, ((tensor, whole), twin)): (usize, ((&Tensor, &Tensor), &Option<Tensor>))| match (tensor.role, twin) {
            // The structure of an optimizer's state is the proof (`formats::pairing`).
            (role, _) if role.group() != Role::Weight => Ok(true),
            _ if tensor.is_trained_by_numbers() && !may_be_trained(material, &statistics, tensor)? => Ok(false),
            // Paired by number, with a name that says otherwise.
            _ if tensor.is_paired_by_number() && statistics.is_mean(&tensor.path) => Ok(false),
            _ if tensor.trained.is_some() && !tensor.is_trained_by_shape_only() => Ok(true),
            (_, Some(twin)) if tensor.trained.is_some() => {
                let states = states.get(&at).map(Vec::as_slice).unwrap_or_default();
                follows_its_moment(material, states, tensors, (tensor, twin))
            }
            (_, Some(twin)) => Ok(!statistics.contains(&tensor.path)
                && moves_like_a_parameter(material, tensor, twin)?
                && !has_structure(material, whole)?),
            (_, None) => Ok(false),
        };
    let all = tensors.par_iter().zip(whole).zip(twins).enumerate();
    let mut proven = all.map(by_itself).collect::<io::Result<Vec<bool>>>()?;
    for i in 0..tensors.len() {
        // An average of a parameter is proven with it, and is near it. An average of squares or gradients is not.
        if tensors[i].role == Role::Ema
            && let Some(of) = tensors[i].of
        {
            proven[i] = (proven[i] || proven[of]) && is_average(material, &statistics, [&whole[i], &whole[of]])?;
        }
    }
    Ok(proven)
}

/// Takes the proof from tensors whose ends are not finite, and from their other moments.
pub(super) fn except_ends(material: &Material, tensors: &[Tensor], proven: &mut [bool]) -> io::Result<()> {
    for (i, whole) in material.description.tensors.iter().enumerate() {
        if proven[i] && !has_finite_edges(material, whole, &tensors[i])? {
            proven[i] = false;
            tensors[i].partner.into_iter().for_each(|other| proven[other] = false);
        }
    }
    Ok(())
}

/// Whether the ends of a large tensor are finite, which stay in the skeleton. The tensor is exact if anything in it is not.
fn has_finite_edges(material: &Material, whole: &Tensor, middle: &Tensor) -> io::Result<bool> {
    let place = |at: u64| at.saturating_sub(whole.extent.start);
    for edge in [0..place(middle.extent.start), place(middle.extent.end)..place(whole.extent.end)] {
        if !edge.is_empty() && !are_finite(whole.dtype, &read(material.source, whole, &[edge])?) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether nothing contradicts that a tensor is a trained parameter: not its name, and not its signs. Fisher's
/// information and means of squares have the shapes of parameters, and are nowhere negative.
fn may_be_trained(material: &Material, statistics: &Statistics, tensor: &Tensor) -> io::Result<bool> {
    let are_negative = |bytes: Vec<u8>| values(tensor.dtype, &bytes).iter().any(|x| *x < 0.0);
    Ok(!statistics.is_mean(&tensor.path) && are_negative(read(material.source, tensor, &sample(tensor))?))
}

/// Whether a tensor is an average of a parameter: as near it as a parameter's next states are. A young average may be
/// farther, and stays exact. Its direction proves nothing: a bias that has just begun has the direction of its
/// gradients.
fn is_average(material: &Material, statistics: &Statistics, [average, of]: [&Tensor; 2]) -> io::Result<bool> {
    if statistics.is_mean(&average.path) {
        return Ok(false);
    }
    let places = sample(average);
    let [now, then] = [of, average].map(|tensor| read(material.source, tensor, &places));
    let (now, then) = (values(of.dtype, &now?), values(average.dtype, &then?));
    let apart: Vec<f64> = now.iter().zip(&then).map(|(a, b)| a - b).collect();
    Ok(mean_square(&apart).sqrt() <= MOST_MOVED * mean_square(&now).sqrt())
}

/// Whether a tensor moves in the direction of its optimizer's first moment or momentum. Then that state is its own.
fn follows_its_moment(
    material: &Material,
    states: &[&Tensor],
    tensors: &[Tensor],
    (tensor, twin): (&Tensor, &Tensor),
) -> io::Result<bool> {
    /// Least correlation of move and moment: .4 at 25 iterations of Adam, and .1 at 400.
    const LEAST: f64 = 0.05;
    /// Standard deviations of chance that the correlation must reach. Chance has 1 / sqrt(samples).
    const SURE: f64 = 5.0;
    /// Below it chance alone would ask for half of Adam's correlation.
    const LEAST_SAMPLES: usize = 1024;
    let same = |state: &&&Tensor| state.shape == tensor.shape && state.dtype == tensor.dtype;
    let Some(state) = states.iter().find(same) else { return Ok(false) };
    let second = state.partner.map(|partner| &tensors[partner]).filter(|second| second.dtype == state.dtype);
    let places = sample(tensor);
    let now = read(material.source, tensor, &places)?;
    let moves = updates(tensor.dtype, &read(material.newer.0, twin, &places)?, &now);
    let mut moments = values(state.dtype, &read(material.source, state, &places)?);
    if let Some(second) = second {
        let squares = values(second.dtype, &read(material.source, second, &places)?);
        moments.iter_mut().zip(squares).for_each(|(m, v)| *m = if v > 0.0 { *m / v.sqrt() } else { 0.0 });
    }
    let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let least = LEAST.max(SURE / (moves.len() as f64).sqrt());
    let correlates = -sum(&moves, &moments) > least * (sum(&moves, &moves) * sum(&moments, &moments)).sqrt();
    Ok(moves.len() >= LEAST_SAMPLES && correlates)
}

/// Whether two successive states show that a tensor is a trained parameter.
fn moves_like_a_parameter(material: &Material, tensor: &Tensor, twin: &Tensor) -> io::Result<bool> {
    let large = tensor.shape.len() >= 2 && tensor.shape.iter().product::<u64>() >= LEAST_ELEMENTS;
    if !large || !tensor.dtype.is_lattice_float() || !is_of_layer(&tensor.path) {
        return Ok(false);
    }
    let least = if tensor.dtype.size() == 2 { LEAST_MOVED_OF_16_BITS } else { LEAST_MOVED };
    let places = sample(tensor);
    let (now, then) = (read(material.source, tensor, &places)?, read(material.newer.0, twin, &places)?);
    let (weights, moves) = (values(tensor.dtype, &now), updates(tensor.dtype, &then, &now));
    let everywhere = moves.chunks(SAMPLE_ELEMENTS).all(|moves| share(moves, |x| x != 0.0) >= least);
    let rms = mean_square(&weights).sqrt();
    let of_both_signs = |of: &[f64]| {
        let some = share(of, |x| x != 0.0);
        [share(of, |x| x > 0.0), share(of, |x| x < 0.0)].iter().all(|share| *share >= LEAST_OF_EACH_SIGN * some)
    };
    Ok(everywhere
        && weights.iter().chain(&moves).all(|x| x.is_finite())
        && of_both_signs(&weights)
        && of_both_signs(&moves)
        && share(&weights, |x| x == 0.0) <= MOST_ZEROS
        && mean_square(&moves).sqrt() <= MOST_MOVED * rms
        && moves.iter().all(|x| x.abs() <= MOST_OF_ONE * rms)
        && (tensor.dtype.size() == 2 || distinct(&weights) >= LEAST_DISTINCT))
}

fn share(of: &[f64], is: impl Fn(f64) -> bool) -> f64 {
    of.iter().filter(|x| is(**x)).count() as f64 / of.len().max(1) as f64
}

/// Share of distinct magnitudes.
fn distinct(values: &[f64]) -> f64 {
    let mut bits: Vec<u64> = values.iter().map(|x| x.abs().to_bits()).collect();
    bits.sort_unstable();
    let count = bits.len().max(1);
    bits.dedup();
    bits.len() as f64 / count as f64
}

/// Whether a matrix has structure that no optimizer keeps. It equals its transpose (a covariance, a whitening), or
/// all its rows have one length (a memory bank, a table of directions).
fn has_structure(material: &Material, tensor: &Tensor) -> io::Result<bool> {
    /// Pairs and rows compared. By chance not even two are alike.
    const COMPARED: u64 = 16;
    /// Larger than the roundings by which the two halves of a computed inverse differ.
    const ALIKE: f64 = 1e-3;
    let size = tensor.dtype.size() as u64;
    let [.., rows, columns] = tensor.shape[..] else { return Ok(false) };
    let alike = |a: f64, b: f64| (a - b).abs() <= ALIKE * a.abs().max(b.abs());
    let at = |row: u64, column: u64| -> io::Result<f64> {
        let place = (row * columns + column) * size;
        Ok(values(tensor.dtype, &read(material.source, tensor, from_ref(&(place..place + size)))?)[0])
    };
    let mut symmetric = rows == columns;
    for row in 0..COMPARED.min(rows / 2) {
        if symmetric {
            let column = rows - 1 - row;
            symmetric = alike(at(row, column)?, at(column, row)?);
        }
    }
    /// Longer rows are not compared: whole rows of a crafted shape would take all memory.
    const LONGEST_ROW: u64 = 1 << 16;
    let mut lengths = Vec::new();
    for sample in (0..COMPARED.min(rows)).take_while(|_| columns <= LONGEST_ROW) {
        let from = sample * rows / COMPARED.min(rows) * columns * size;
        let row = read(material.source, tensor, from_ref(&(from..from + columns * size)))?;
        lengths.push(mean_square(&values(tensor.dtype, &row)).sqrt());
    }
    Ok(symmetric || !lengths.is_empty() && lengths.windows(2).all(|pair| alike(pair[0], pair[1])))
}

/// Tensors of modules that keep statistics. A codebook that follows the mean of data has a layer's name, and moves
/// like a parameter.
struct Statistics<'a> {
    /// Modules with statistics.
    modules: HashSet<&'a str>,
    /// Whether some tensor has the name `weight`. Otherwise `down_proj` may be an activation.
    weights: bool,
}

impl<'a> Statistics<'a> {
    fn of(tensors: &'a [Tensor]) -> Statistics<'a> {
        /// Words in the names of such statistics.
        const WORDS: &str = "ema cluster avg average mean cov count counts usage stats size sum";
        let is_statistic = |tensor: &Tensor| {
            let (_, name) = module(&tensor.path);
            tensor.role.group() != Role::Optimizer
                && !is_of_layer(name)
                // Batch normalization's, which stand beside parameters.
                && !name.starts_with("running_")
                && name.split(|c: char| !c.is_alphanumeric()).any(|word| WORDS.split(' ').any(|known| word.eq_ignore_ascii_case(known)))
        };
        let found = tensors.iter().filter(|tensor| is_statistic(tensor));
        let modules = found.map(|tensor| module(&tensor.path).0).collect();
        Statistics { modules, weights: tensors.iter().any(|tensor| tensor.path.ends_with("weight")) }
    }

    /// Whether a tensor stands in a mapping that keeps a statistic of each parameter under the parameter's own name.
    fn is_mean(&self, path: &str) -> bool {
        const MEANS: &str =
            "vq mean means sq square squares var variance cov covariance fisher importance omega hessian";
        let own = module(path).0.to_ascii_lowercase();
        own.split(|c: char| !c.is_alphanumeric()).any(|word| MEANS.split(' ').any(|mean| mean == word))
    }

    /// Whether a tensor is a statistic, by its name or by its module's other tensors, or those of the module
    /// above.
    fn contains(&self, path: &str) -> bool {
        /// Parts of the names of modules that keep data, or means of data, as their weight.
        const KEEPERS: &str =
            "codebook quantiz centroid cluster prototype bank memory queue kmeans center centre whiten cache";
        let (own, name) = module(path);
        let lower = path.to_ascii_lowercase();
        KEEPERS.split(' ').any(|keeper| lower.contains(keeper))
            || self.is_mean(path)
            || !self.weights && name.ends_with("_proj")
            || self.modules.contains(own)
            || own.contains(['.', '/']) && self.modules.contains(module(own).0)
    }
}

/// The module that a tensor stands in, and its name there.
fn module(path: &str) -> (&str, &str) {
    match path.rfind(['.', '/']) {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => ("", path),
    }
}
