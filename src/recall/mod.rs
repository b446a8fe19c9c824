//! Recall: which objects and tiles a read needs; tiles to bytes; the cache of decoded files.
