//! Archive, recall and verify of stores that are not mounted, from files written into the tree to bytes read back.

mod archive;
mod damage;
mod fresh;
mod golden;
mod groups;
mod merge;
mod profiles;
mod recall;
mod retention;
mod scale;
mod series;
