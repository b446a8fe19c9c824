//! The steps of a file's life that a crash may interrupt, each with the state after it.
//!
//! Every change of the store names its step. Production ignores the name. The crash tests (`tests/at_rest/crash/`)
//! stop before and after each step, name it in reports, and fail if they never met one of the steps.

macro_rules! points {
    ($($(#[doc = $sentence:literal])+ $name:ident,)+) => {
        /// A step that a crash may interrupt: "if we die here, then ...".
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum CrashPoint { $($(#[doc = $sentence])+ $name,)+ }

        impl CrashPoint {
            /// All steps, in the order of a store's life.
            pub const ALL: &[CrashPoint] = &[$(CrashPoint::$name,)+];

            /// The state after a crash here.
            pub fn sentence(self) -> &'static str {
                match self { $(CrashPoint::$name => concat!($($sentence, "\n",)+).trim_ascii(),)+ }
            }
        }
    };
}

points! {
    /// If we die here, then the store lacks `stepfs.toml` or a directory, and the next attempt completes it.
    StoreMade,
    /// If we die here, then the settings are unchanged, and the next change overwrites `stepfs.toml.new`.
    SettingsWritten,
    /// If we die here, then the settings are the old ones or the new ones, each whole.
    SettingsInPlace,
    /// If we die here, then data that a killed daemon had not synced is as little durable as before, and nothing relies
    /// on it.
    Begun,
    /// If we die here, then the next mount takes the file for one that was just closed.
    FileSealed,
    /// If we die here, then the file may have lost a name that was not durable; nothing relies on it yet.
    NamesSealed,
    /// If we die here, then an object without header is in `tmp/` and is removed; its file is untouched.
    ObjectWritten,
    /// If we die here, then a compared object with header is in `tmp/` and is removed; its file is untouched and is
    /// archived again.
    ObjectCompleted,
    /// If we die here, then `objects/` may have one more empty directory.
    ShardMade,
    /// If we die here, then the object has its name or not; no file names it, and it is used or collected.
    ObjectInPlace,
    /// If we die here, then another encoding of an object is in `tmp/` and is removed.
    MergeWritten,
    /// If we die here, then another encoding with its header is in `tmp/` and is removed.
    MergeCompleted,
    /// If we die here, then the object has the old encoding or the new one; the parents of both still exist.
    MergeInPlace,
    /// If we die here, then a stub is in `tmp/` and is removed; the file is untouched.
    StubWritten,
    /// If we die here, then the note gives the times of the directory of a file that is not released, and is void.
    NoteWritten,
    /// If we die here, then the file is itself or its stub, whose object is durable; recovery carries out the note.
    StubInPlace,
    /// If we die here, then recovery carries out the note.
    DirectoryTimes,
    /// If we die here, then the file is itself or its stub, and recovery carries out the note.
    ReleaseSynced,
    /// If we die here, then recovery may carry out the note once more, which changes nothing.
    NoteRemoved,
    /// If we die here, then a decoded file is in `tmp/` or `cache/` and is removed; the stub is untouched.
    RecallWritten,
    /// If we die here, then the name has the stub or the decoded file, and the object exists for either.
    RecallInPlace,
    /// If we die here, then the name has the stub or the decoded file, and the directory's times may have changed.
    RecallTimes,
    /// If we die here, then the name has the stub or the decoded file: the archive learns of the file only after this.
    RecallSynced,
    /// If we die here, then the name exists with its content, or is gone.
    NameRemoved,
    /// If we die here, then removed names may come back, and all their objects exist.
    RemovedNamesSynced,
    /// If we die here, then objects that no file names are left, and are removed after the next mount.
    ObjectRemoved,
    /// If we die here, then the counts of restores are the old ones.
    RestoresWritten,
    /// If we die here, then the counts of restores are the old ones or the new ones.
    RestoresInPlace,
    /// If we die here, then recovery carries out a note again.
    NoteCarriedOut,
    /// If we die here, then the next mount empties the rest of `tmp/`.
    TmpEmptied,
    /// If we die here, then part of an imported file is in `tmp/` and is removed; its source is untouched.
    ImportWritten,
    /// If we die here, then the whole imported file exists, or none of it.
    ImportInPlace,
    /// If we die here, then there is a file with the ending `.stepfs-export`, which the next export to that place
    /// replaces.
    ExportWritten,
    /// If we die here, then the whole exported file exists, or the file that was there before.
    ExportInPlace,
    /// If we die here, then the staging directory is left, to be removed by hand; no version has a new name.
    ReshardWritten,
    /// If we die here, then the new version exists with all its files, or not at all.
    ReshardInPlace,
    /// If we die here, then the replacement of a damaged file is in `tmp/` and is removed; the damage is unchanged.
    RepairWritten,
    /// If we die here, then the damaged file is in its place or in `damaged/`, or in both; the next repair continues
    /// from there.
    DamagedSetAside,
    /// If we die here, then the damaged file or its replacement is in place; the damaged file is in `damaged/` either
    /// way.
    RepairInPlace,
    /// If we die here, then a pin or a profile has the old value or the new one; the call that set it has not returned.
    Marked,
    /// If we die here, then a program's own fsync has not returned.
    Fsync,
}
