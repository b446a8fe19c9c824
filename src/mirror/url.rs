//! The URL of a mirror: `file:///DIRECTORY` or `s3://BUCKET/PREFIX`.

use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "s3")]
use super::bucket::{Bucket, is_listed_as_written};
use super::directory::Directory;
use super::place::{Error, Place, Result};

/// Opens a mirror. It need not answer yet. A bucket's endpoint, region and credentials come from the environment.
///
/// # Errors
/// [`Error::Denied`] for a URL that stepfs does not know. It names no credentials.
pub fn open(url: &str) -> Result<Arc<dyn Place>> {
    let denied = |words: String| Err(Error::Denied(words));
    match url.split_once("://") {
        Some(("file", path)) if path.starts_with('/') => Ok(Arc::new(Directory::open(Path::new(path)))),
        Some(("file", _)) => denied(format!("{url}: write file:/// and an absolute path")),
        // Before any words that have the URL.
        _ if url.contains(['@', '?', '#']) => {
            denied("credentials and options do not belong into a mirror's URL; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY".into())
        }
        #[cfg(feature = "s3")]
        Some(("s3", rest)) => match rest.split_once('/').map(|(bucket, prefix)| (bucket, prefix.trim_matches('/'))) {
            Some(("", _) | (_, "")) | None => denied(format!("{url}: write s3://BUCKET/PREFIX")),
            Some((_, prefix)) if !is_listed_as_written(prefix) => denied(format!(
                "{url}: use letters, digits and -_.!&$=;:+,() between single slashes in a mirror's URL"
            )),
            Some((bucket, prefix)) => Ok(Arc::new(Bucket::open(bucket, prefix)?)),
        },
        #[cfg(not(feature = "s3"))]
        Some(("s3", _)) => denied("this stepfs was built without s3".into()),
        _ => denied(format!("{url}: a mirror is file:///DIRECTORY or s3://BUCKET/PREFIX")),
    }
}

/// The directory of a `file://` URL.
pub fn directory_of(url: &str) -> Option<&Path> {
    url.strip_prefix("file://").map(Path::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_urls_are_refused_in_words() {
        let with_secrets = ["s3://key:secret@b/p", "s3://key:secret@b", "https://key:secret@host/p", "key:secret@b"];
        for url in ["", "/tmp/x", "ftp://a/b", "file://relative", "s3://bucket", "s3:///p"].iter().chain(&with_secrets)
        {
            let error = open(url).err().unwrap().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
