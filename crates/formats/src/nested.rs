//! A zip whose stored members are zips of torch.save, as stable-baselines3 writes it: `policy.pth`,
//! `policy.optimizer.pth` and others.
//!
//! Each member is described as a file of its own, below its name. An optimizer in one member may prove weights in
//! another. A member that is compressed, or no zip of torch.save, is left out: its bytes are kept as they are.

use super::patch::Checksums;
use super::proof::Training;
use super::read::{Fail, bad, refuse_if, unless_bad};
use super::torch::{self, Contents, is_torch};
use super::zip::{MAX_DIRECTORY, Record, Zip};
use super::{Description, Kind, ReadAt, path};

/// Most members that are looked into, each of which may cost what a file of torch.save does.
const MAX_MEMBERS: usize = 64;

/// Longest name of a member, in bytes: each of its tensors repeats it.
const MAX_NAME: usize = 256;

/// All paths together, in bytes.
const MAX_PATHS: usize = 64 << 20;

/// Whether the zip has a stored member that begins as a zip.
pub(super) fn is_nested(src: &dyn ReadAt, zip: &Zip) -> Result<bool, Fail> {
    for record in &zip.records {
        if begins_as_zip(src, record)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn begins_as_zip(src: &dyn ReadAt, record: &Record) -> Result<bool, Fail> {
    let mut start = [0; 4];
    if !record.stored || record.payload.end - record.payload.start < 4 {
        return Ok(false);
    }
    src.read_exact_at(&mut start, record.payload.start)?;
    Ok(start == *b"PK\x03\x04")
}

/// Describes the file.
pub(super) fn describe(src: &dyn ReadAt, zip: Zip) -> Result<Description, Fail> {
    let (mut tensors, mut training, mut zips) = (Vec::new(), Training::default(), Vec::new());
    let (mut members, mut odd, mut directories, mut paths) = (0, 0, 0, 0);
    for record in &zip.records {
        if !begins_as_zip(src, record)? {
            continue;
        }
        members += 1;
        refuse_if(members > MAX_MEMBERS, "zip: more than 64 zips in one zip")?;
        let found = unless_bad(member(src, record, zip.name(record)))?;
        let Some((member, Contents { stored, id, .. })) = found else {
            odd += 1;
            continue;
        };
        directories += member.directory_len();
        refuse_if(directories > MAX_DIRECTORY, "zip: central directories larger than 64 MiB")?;
        let mut name = String::new();
        path::push_text(&mut name, &String::from_utf8_lossy(zip.name(record)));
        let first = tensors.len();
        for mut tensor in stored.tensors {
            tensor.path = match tensor.path.as_str() {
                "." => name.clone(),
                path => format!("{name}/{path}"),
            };
            paths += tensor.path.len();
            refuse_if(paths > MAX_PATHS, "zip: the tensors' names are too long to keep")?;
            tensor.of = tensor.of.map(|of| first + of);
            tensor.partner = tensor.partner.map(|partner| first + partner);
            tensors.push(tensor);
        }
        training.append(stored.training, first);
        zips.push((member, id));
    }
    let note = (odd > 0).then(|| format!("zip: {odd} zips in it are none of torch.save that stepfs looks into"));
    if let (true, Some(note)) = (tensors.is_empty(), &note) {
        return bad(note);
    }
    refuse_if(Description::has_twins(&tensors), "zip: two tensors of its zips have the same path")?;
    let optimizers = training.optimizers.clone();
    training.prove(&mut tensors, &optimizers);
    let checksums = Some(Checksums::within(zip, zips));
    Ok(Description { note, checksums, ..Description::new(Kind::Nested, tensors, training) })
}

/// A member that is a zip of torch.save.
fn member(src: &dyn ReadAt, record: &Record, name: &[u8]) -> Result<(Zip, Contents), Fail> {
    let (zip, start) = Zip::read_before(src, record.payload.end)?;
    refuse_if(start != record.payload.start || !is_torch(&zip) || name.len() > MAX_NAME, "zip: no zip of torch.save")?;
    let contents = torch::read(src, &zip)?;
    Ok((zip, contents))
}
