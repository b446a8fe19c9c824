//! Archive, recall and verify of stores that are not mounted, from files written into the tree to bytes read back.

mod adam;
mod archive;
mod compare;
mod crash;
mod damage;
mod elasticdl;
mod exact;
mod fresh;
mod given;
mod golden;
mod groups;
mod hostile;
mod merge;
mod odd;
mod opaque;
mod optimizer;
mod optimizers;
mod profiles;
mod proof;
mod published;
mod recall;
mod retention;
mod scale;
mod series;
mod sound;
mod torch;
