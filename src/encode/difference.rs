//! From a file to its object: plan, encode, close, read back, compare. What becomes of the object is for others to say.

use std::path::Path;
use std::sync::Arc;

use crate::recall::{Chain, Memory};
use crate::store::durable::Io;
use crate::store::object::{Header, ObjectWriter};
use formats::{Order, ReadAt};

use super::error::StepResult;
use super::plan::{Job, Material};
use super::runs::{self, Runs};
use super::workers::Workers;
use super::{STAGES, original, plan, tensors, verify};

/// An object that takes more than this share of its file is not worth it.
const MOST_OF_FILE: (u64, u64) = (19, 20);

/// What an object's header says of its file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// In bytes.
    pub(crate) len: u64,
    /// Modification time in nanoseconds since 1970.
    pub(crate) modified_ns: i64,
    /// The file's fingerprint (`fingerprint.rs`).
    pub(crate) sample: u64,
    /// Hash of the tensors' names, types and shapes.
    pub(crate) signature: u64,
    /// Hash of the signature and of the path without its step numbers.
    pub(crate) lineage: u64,
}

/// A file, and the base that it becomes a difference to.
#[derive(Clone, Copy)]
pub(crate) struct Difference<'a> {
    pub(crate) path: &'a Path,
    pub(crate) facts: Facts,
    pub(crate) material: Material<'a>,
    /// Why the other state is not proven to be one of the same run, for people. Then nothing is lost.
    pub(crate) refusal: Option<&'a str>,
    /// The file as it was written.
    pub(crate) written: &'a (dyn ReadAt + Sync),
    /// Restores that are behind the file; asked when all is encoded.
    pub(crate) generations: &'a (dyn Fn() -> u32 + Sync),
    /// Where the object is written.
    pub(crate) tmp: (&'a Io, &'a Path),
    pub(crate) memory: &'a Arc<Memory>,
    pub(crate) workers: &'a Workers,
    pub(crate) cancelled: &'a (dyn Fn() -> bool + Sync),
}

/// An object that was read back and compared with its file. It has no header and no name yet.
pub(crate) struct Written {
    pub(crate) writer: ObjectWriter,
    /// The one that it is to get.
    pub(crate) header: Header,
    pub(crate) chain: Chain,
}

impl Difference<'_> {
    /// Encodes the file as difference to the base, or as keyframe. `None`: not worth it.
    ///
    /// # Errors
    /// [`StepError::Cancelled`]; `InvalidData` when it does not decode to what it should; what the device reports.
    pub(crate) fn write(&self) -> StepResult<Option<Written>> {
        original::beside(self.written, self.facts.len, self.cancelled, |original| self.write_with(original))
    }

    /// `original` gives the hash of the file as it was written.
    fn write_with(&self, original: original::Pending<'_>) -> StepResult<Option<Written>> {
        let (facts, Material { source, description, base, profiles, .. }) = (self.facts, self.material);
        log::trace!(target: STAGES, "begin");
        let (plans, forecast, runs);
        let description = if runs::are_in(description) {
            let find = || runs::find(source, description, facts.sample, base.chain.as_ref(), base.super_step);
            Runs { description: runs, planned: plan::Planned { plans, forecast } } = self.workers.install(find)?;
            &runs
        } else {
            plan::Planned { plans, forecast } = self.workers.install(|| plan::plan(&self.material))?;
            description
        };
        log::trace!(target: STAGES, "plan");
        let chain = base.chain.as_ref().filter(|_| plans.iter().any(|plan| plan.parent.is_some()));
        let position = chain.map_or(0, |_| base.position);
        let note = match self.refusal {
            Some(why) => format!("not proven to be a step of one run: {why}"),
            None => forecast.map_or(base.note.to_string(), |forecast| forecast.words()),
        };
        if !note.is_empty() {
            log::info!("{}: {note}", self.path.display());
        }
        let mut writer = ObjectWriter::create_on(self.tmp.0, self.tmp.1)?;
        let job = Job {
            source,
            len: facts.len,
            origin: self.path,
            profile: &profiles.words(),
            description,
            base: chain,
            plans: &plans,
            position,
            note: &note,
            cancelled: self.cancelled,
        };
        let mut encoded = tensors::encode(&job, self.workers, &mut writer)?;
        if writer.position() > facts.len / MOST_OF_FILE.1 * MOST_OF_FILE.0 {
            return Ok(None);
        }
        encoded.index.generations = (self.generations)();
        writer.close(&encoded.index)?;
        log::trace!(target: STAGES, "make durable");
        let rows = Order::of(description);
        let mut header = Header {
            id: writer.id(),
            parent: chain.map(|chain| chain.leaf().header().id),
            depth: chain.map_or(0, |chain| chain.objects().len() as u32),
            position,
            logical_len: facts.len,
            lossy: false,
            ordered: !rows.is_kept(),
            decoded_hash: 0,
            decoded_sample: 0,
            source_sample: facts.sample,
            original: [0; 32],
            modified_ns: facts.modified_ns,
            lineage: facts.lineage,
            signature: facts.signature,
        };
        // A base that went bad on the device while memory had it is found by the next super-step.
        let chain = Chain::of_new(writer.reopen(header.clone())?, chain, self.memory, base.super_step);
        let expected = verify::Expected { source, rows: &rows, patches: &encoded.patches };
        let decoded = verify::verify(&chain, &expected, self.workers, self.cancelled)
            .inspect_err(|_| self.memory.forget(header.id))?;
        log::trace!(target: STAGES, "verify");
        header.lossy = encoded.differs || decoded.patched;
        (header.decoded_hash, header.decoded_sample) = (decoded.hash, decoded.sample);
        header.original = original.wait()?;
        Ok(Some(Written { writer, header, chain }))
    }
}
