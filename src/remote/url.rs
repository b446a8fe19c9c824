//! The URL of a remote: `file:///DIRECTORY` or `s3://BUCKET/PREFIX`.

use std::path::Path;
use std::sync::Arc;

use super::directory::Directory;
use super::place::{Error, Place, Result};

/// Opens a remote. A bucket's endpoint, region and credentials come from the environment.
///
/// # Errors
/// [`Error::Denied`] for a URL that stepfs does not know; those of the remote.
pub fn open(url: &str) -> Result<Arc<dyn Place>> {
    match url.split_once("://") {
        Some(("file", path)) if path.starts_with('/') => Ok(Arc::new(Directory::open(Path::new(path))?)),
        Some(("file", _)) => Err(Error::Denied(format!("{url}: write file:/// and an absolute path"))),
        #[cfg(feature = "s3")]
        Some(("s3", rest)) => {
            let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
            let prefix = prefix.trim_matches('/');
            if bucket.is_empty() || prefix.is_empty() {
                return Err(Error::Denied(format!("{url}: write s3://BUCKET/PREFIX")));
            }
            if rest.contains(['@', '?', '#']) {
                return Err(Error::Denied("credentials and options do not belong into a URL; set AWS_*".into()));
            }
            Ok(Arc::new(super::bucket::Bucket::open(bucket, prefix)?))
        }
        #[cfg(not(feature = "s3"))]
        Some(("s3", _)) => Err(Error::Denied("this stepfs was built without s3".into())),
        _ => Err(Error::Denied(format!("{url}: a remote is file:///DIRECTORY or s3://BUCKET/PREFIX"))),
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
        for url in ["", "/tmp/x", "ftp://a/b", "file://relative", "s3://bucket", "s3:///p", "s3://key:secret@b/p"] {
            let error = open(url).err().unwrap().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
