//! The steps of a file's life that a crash may interrupt, each with what is found after it.
//!
//! Every change of the store names the step that it belongs to. Production ignores the name; the tests that own the crash
//! (`tests/crash/`) stop before and after each, report by it, and fail if one of them was never met.

macro_rules! points {
    ($($(#[doc = $sentence:literal])+ $name:ident,)+) => {
        /// A step that a crash may interrupt: "if we die here, then ...".
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum CrashPoint { $($(#[doc = $sentence])+ $name,)+ }

        impl CrashPoint {
            /// All of them, in the order of a store's life.
            pub const ALL: &[CrashPoint] = &[$(CrashPoint::$name,)+];

            /// What is found after a crash here.
            pub fn sentence(self) -> &'static str {
                match self { $(CrashPoint::$name => concat!($($sentence, "\n",)+).trim_ascii(),)+ }
            }
        }
    };
}

points! {
    /// If we die here, then there is a directory without `stepfs.toml`, and the next attempt completes it.
    StoreMade,
    /// If we die here, then the settings are what they were, and `stepfs.toml.new` is written over at the next change.
    SettingsWritten,
    /// If we die here, then the settings are the old ones or the new ones, each whole.
    SettingsInPlace,
    /// If we die here, then what a killed daemon had not synced is as little durable as before, and nothing was built on it.
    Begun,
    /// If we die here, then the next mount finds a file that it takes for one that was just closed.
    FileSealed,
    /// If we die here, then the file may have lost a name that nobody had made durable; nothing counts on it yet.
    NamesSealed,
    /// If we die here, then an object without header lies in `tmp/` and is removed; its file is untouched.
    ObjectWritten,
    /// If we die here, then the same, with its header; it was compared with its file and is written again.
    ObjectCompleted,
    /// If we die here, then `objects/` has an empty directory more, or not.
    ShardMade,
    /// If we die here, then the object has its name or not; nobody names it, and it is used or collected.
    ObjectInPlace,
    /// If we die here, then another encoding of an object lies in `tmp/` and is removed.
    MergeWritten,
    /// If we die here, then the same, with its header.
    MergeCompleted,
    /// If we die here, then the object has the old encoding or the new one; the parents of both are still there.
    MergeInPlace,
    /// If we die here, then a stub lies in `tmp/` and is removed; the file is untouched.
    StubWritten,
    /// If we die here, then the note says of a file that is no stub what its directory's times are, and is void.
    NoteWritten,
    /// If we die here, then the file is itself or its stub, whose object is durable; the note is carried out.
    StubInPlace,
    /// If we die here, then the note is carried out.
    DirectoryTimes,
    /// If we die here, then the file is itself or its stub, and the note is carried out.
    ReleaseSynced,
    /// If we die here, then the note is carried out once more, or was it: that changes nothing.
    NoteRemoved,
    /// If we die here, then a decoded file lies in `tmp/` and is removed; the stub is untouched.
    RecallWritten,
    /// If we die here, then there is the stub or the decoded file, and the object is there for either.
    RecallInPlace,
    /// If we die here, then the same; the directory may show that something happened in it.
    RecallTimes,
    /// If we die here, then the same: the archive is told of the file only after this.
    RecallSynced,
    /// If we die here, then the name is there, with all that it stands for, or gone.
    NameRemoved,
    /// If we die here, then names that went may come back, and their objects are all there.
    RemovedNamesSynced,
    /// If we die here, then objects that nobody names are left, and go after the next mount.
    ObjectRemoved,
    /// If we die here, then the counts of restores are the old ones.
    RestoresWritten,
    /// If we die here, then the counts of restores are the old ones or the new ones.
    RestoresInPlace,
    /// If we die here, then a note is carried out again.
    NoteCarriedOut,
    /// If we die here, then the rest of `tmp/` goes at the next mount.
    TmpEmptied,
    /// If we die here, then part of an imported file lies in `tmp/` and is removed; its source is where it was.
    ImportWritten,
    /// If we die here, then the imported file is there as a whole, or not.
    ImportInPlace,
    /// If we die here, then there is a file with the ending `.stepfs-export`, which the next export to that place replaces.
    ExportWritten,
    /// If we die here, then the exported file is there as a whole, or what was there before.
    ExportInPlace,
    /// If we die here, then the staging directory is left, to be removed by hand; no version has a new name.
    ReshardWritten,
    /// If we die here, then the new version is there with all its files, or not at all.
    ReshardInPlace,
    /// If we die here, then what takes the place of something damaged lies in `tmp/` and is removed; the damage is as it was.
    RepairWritten,
    /// If we die here, then what is damaged is where it was or in `damaged/`, or in both; the next repair goes on from there.
    DamagedSetAside,
    /// If we die here, then there is what was damaged or what takes its place; what was damaged is in `damaged/` for either.
    RepairInPlace,
    /// If we die here, then the damaged settings are in place, and perhaps beside it as `stepfs.toml.damaged`.
    SettingsKept,
    /// If we die here, then a pin or a profile is as it was or as it was to be; whoever set it has not been told that it is.
    Marked,
    /// If we die here, then a program's own fsync has not returned.
    Fsync,
}
