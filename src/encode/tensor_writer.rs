//! A tensor that is being written: its tiles come in order, and end as an entry of the index.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::store::object::{ObjectWriter, TensorEntry, Tile};
use crate::tile::{Checked, Coding};
use codec::hash::xxh3_64;
use codec::log::Factors;
use formats::{ChangedTensor, Checksum, ReadAt};

use super::plan::{Job, tiles};

pub(super) struct EncodedTile {
    pub(super) payload: Vec<u8>,
    /// The comparison of the bytes that it decodes to with the file's.
    pub(super) checked: Checked,
}

/// The factors of a tensor, and their payload.
pub(super) struct EncodedFactors {
    pub(super) factors: Arc<Factors>,
    payload: Vec<u8>,
}

impl EncodedFactors {
    pub(super) fn new(factors: Factors) -> EncodedFactors {
        let mut payload = Vec::new();
        factors.encode(&mut payload);
        EncodedFactors { factors: Arc::new(factors), payload }
    }
}

/// A tensor that is written.
pub(super) struct Done {
    pub(super) entry: TensorEntry,
    /// Of a logarithmic lattice with its own.
    pub(super) factors: Option<Arc<Factors>>,
    /// True if it decodes to other bytes than those written.
    pub(super) differs: bool,
    crc_before: u32,
    crc_after: u32,
}

impl Done {
    /// For the container, where the tensor's checksum is another one now.
    pub(super) fn changed(&self, job: &Job, at: usize) -> Option<ChangedTensor> {
        let (crc_before, crc_after) = (self.crc_before, self.crc_after);
        (crc_before != crc_after).then(|| ChangedTensor { index: job.plans[at].index, crc_before, crc_after })
    }
}

/// A tensor that is being encoded, and the results of its tiles so far.
pub(super) struct TensorWriter<'a> {
    job: &'a Job<'a>,
    at: usize,
    coding: Coding,
    factors: Option<Arc<Factors>>,
    stored_factors: Option<Tile>,
    tiles: Vec<Tile>,
    crc_before: Checksum,
    crc_after: Checksum,
    /// Largest error so far in the terms of its codec.
    error: f64,
    max_abs_error: f64,
    differs: bool,
}

/// Checksums of tensors are needed where the container has them, and quantizing changes them.
pub(super) fn with_crc(job: &Job, coding: Coding) -> bool {
    job.description.has_checksums() && coding.is_lossy()
}

impl<'a> TensorWriter<'a> {
    /// Of the tensor planned at `at`; its factors are written first, if it has some.
    pub(super) fn begin(
        job: &'a Job<'a>,
        writer: &mut ObjectWriter,
        at: usize,
        coding: Coding,
        factors: Option<&EncodedFactors>,
    ) -> io::Result<TensorWriter<'a>> {
        let tensor = &job.plans[at].tensor;
        let put = |EncodedFactors { payload, .. }: &EncodedFactors| writer.put(payload, xxh3_64(payload));
        let stored_factors = factors.map(put).transpose()?;
        let factors = factors.map(|encoded| Arc::clone(&encoded.factors));
        let mut begun = TensorWriter {
            job,
            at,
            coding,
            factors,
            stored_factors,
            tiles: Vec::with_capacity(tiles(tensor)),
            crc_before: job.description.checksum(),
            crc_after: job.description.checksum(),
            error: 0.0,
            max_abs_error: 0.0,
            differs: false,
        };
        begun.edge(begun.whole().start..tensor.extent.start)?;
        Ok(begun)
    }

    /// The tensor in the file; its plan may leave its edges to the skeleton.
    fn whole(&self) -> Range<u64> {
        self.job.description.tensors[self.job.plans[self.at].index].extent.clone()
    }

    /// The checksum is of the whole tensor, its edges in the skeleton too.
    fn edge(&mut self, extent: Range<u64>) -> io::Result<()> {
        if with_crc(self.job, self.coding) {
            let mut bytes = vec![0; (extent.end - extent.start) as usize];
            ReadAt::read_exact_at(self.job.source, &mut bytes, extent.start)?;
            self.crc_before.update(&bytes);
            self.crc_after.update(&bytes);
        }
        Ok(())
    }

    /// Writes the next tile.
    pub(super) fn put(&mut self, writer: &mut ObjectWriter, tile: &EncodedTile) -> io::Result<()> {
        let Checked { hash, crc, error, max_abs_error, differs } = &tile.checked;
        self.tiles.push(writer.put(&tile.payload, *hash)?);
        if let Some([before, after]) = crc {
            self.crc_before.combine(before);
            self.crc_after.combine(after);
        }
        self.error = self.error.max(*error);
        self.max_abs_error = self.max_abs_error.max(*max_abs_error);
        self.differs |= differs;
        Ok(())
    }

    /// Its entry in the index.
    pub(super) fn finish(mut self) -> io::Result<Done> {
        let tensor = &self.job.plans[self.at].tensor;
        self.edge(tensor.extent.end..self.whole().end)?;
        let entry = TensorEntry {
            path: tensor.path.clone(),
            dtype: tensor.dtype,
            role: tensor.role,
            shape: tensor.shape.clone(),
            extent: tensor.extent.clone(),
            coding: self.coding,
            bound: self.coding.bound(self.error),
            max_abs_error: self.max_abs_error,
            factors: self.stored_factors,
            tiles: self.tiles,
        };
        let (crc_before, crc_after) = (self.crc_before.finalize(), self.crc_after.finalize());
        Ok(Done { entry, factors: self.factors, differs: self.differs, crc_before, crc_after })
    }
}
