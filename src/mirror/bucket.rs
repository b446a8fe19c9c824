//! A bucket as a mirror (`s3://BUCKET/PREFIX`). The only file with asynchronous calls: one small runtime waits for
//! them.

use std::time::Duration;

use futures_util::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ClientConfigKey, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload, RetryConfig};
use tokio::runtime::{Builder, Runtime};

use super::place::{Error, Place, Result};

/// A request that fails is repeated within this time, with growing pauses that vary. The daemon tries again later.
const RETRY_TIME: Duration = Duration::from_secs(5);
/// A connection that is not there within this time will not come.
const CONNECT_TIME: &str = "5 seconds";
/// A request that takes longer than this hangs: a piece needs 140 KB/s.
const REQUEST_TIME: &str = "60 seconds";

/// Where a machine of Amazon's asks for credentials if the environment has none.
const METADATA_SERVICE: &str = "169.254.169.254";
/// Words of a server that throttles.
const BUSY: [&str; 4] = ["SlowDown", "503 Service Unavailable", "429 Too Many Requests", "TooManyRequests"];
/// Most characters of an error.
const MAX_WORDS: usize = 500;

/// The bucket.
pub(super) struct Bucket {
    store: PrefixStore<AmazonS3>,
    runtime: Runtime,
}

impl Bucket {
    /// Opens a bucket. Endpoint, region and credentials come from the environment (`AWS_*`), as `object_store` reads
    /// them.
    pub(super) fn open(bucket: &str, prefix: &str) -> Result<Bucket> {
        // The first provider stays; all are the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let retry = RetryConfig { max_retries: 4, retry_timeout: RETRY_TIME, ..RetryConfig::default() };
        let builder = AmazonS3Builder::from_env();
        let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
        // Some servers have no bulk delete, and a single one costs nothing.
        let builder = builder.with_bucket_name(bucket).with_retry(retry).with_disable_bulk_delete(true);
        let builder = builder.with_allow_http(endpoint.is_some_and(|at| at.starts_with("http://")));
        let limit = AmazonS3ConfigKey::Client;
        let builder = builder.with_config(limit(ClientConfigKey::ConnectTimeout), CONNECT_TIME);
        let builder = builder.with_config(limit(ClientConfigKey::Timeout), REQUEST_TIME);
        let store = builder.build().map_err(|error| told(error, bucket, "open"))?;
        // The threads that move all bytes.
        let runtime = Builder::new_multi_thread().worker_threads(2).thread_name("mirror-net").enable_all().build()?;
        Ok(Bucket { store: PrefixStore::new(store, prefix), runtime })
    }

    /// Waits for the answer to a request that is to do `what` with a name.
    fn ask<T>(&self, name: &str, what: &str, request: impl Future<Output = object_store::Result<T>>) -> Result<T> {
        self.runtime.block_on(request).map_err(|error| told(error, name, what))
    }
}

/// Names of another prefix would be written in one way and listed in another.
pub(super) fn is_listed_as_written(prefix: &str) -> bool {
    Path::from(prefix).as_ref() == prefix
}

/// Sorts an error, without the request's headers or credentials.
fn told(error: object_store::Error, name: &str, what: &str) -> Error {
    use object_store::Error as Of;
    let words = causes(&error);
    match error {
        // A missing bucket is no missing name: nothing may be concluded from it.
        _ if words.contains("NoSuchBucket") => Error::Denied(format!("{name}: the bucket is missing")),
        Of::NotFound { .. } => Error::Missing(name.to_string()),
        Of::PermissionDenied { .. } => Error::Denied(format!("{name}: the permission to {what} is missing: {words}")),
        Of::Unauthenticated { .. } => Error::Denied(format!("{name}: the credentials are missing or wrong: {words}")),
        _ if BUSY.iter().any(|busy| words.contains(busy)) => Error::Busy(format!("{name}: {words}")),
        _ => Error::Away(format!("{name}: {words}")),
    }
}

/// The error's causes in one line.
fn causes(error: &dyn std::error::Error) -> String {
    let all = std::iter::successors(Some(error), |error| error.source());
    let mut words: Vec<String> = all.map(ToString::to_string).collect();
    words.dedup_by(|next, before| before.contains(next.as_str()));
    let text: String = words.join(": ").split_whitespace().collect::<Vec<_>>().join(" ");
    if text.contains(METADATA_SERVICE) {
        return "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY".into();
    }
    in_words(&text).chars().take(MAX_WORDS).collect()
}

/// A server's answer without its markup. Other parts of it than these may repeat keys and tokens of the request.
fn in_words(text: &str) -> String {
    let Some(markup) = text.find("<?xml").or_else(|| text.find("<Error")) else { return text.to_string() };
    let part = |tag: &str| {
        let begin = text.find(&format!("<{tag}>"))? + tag.len() + 2;
        Some(&text[begin..begin + text[begin..].find("</")?])
    };
    let parts = ["Code", "Message"].into_iter().filter_map(part);
    std::iter::once(text[..markup].trim_end_matches([' ', ':'])).chain(parts).collect::<Vec<_>>().join(": ")
}

impl Place for Bucket {
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.ask(name, "write", self.store.put(&Path::from(name), PutPayload::from(bytes.to_vec()))).map(drop)
    }

    fn read(&self, name: &str, most: u64, each: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let path = Path::from(name);
        let options = GetOptions { range: Some((0..most).into()), ..GetOptions::default() };
        let opened = self.ask(name, "read", self.store.get_opts(&path, options))?;
        let mut bytes = opened.into_stream();
        while let Some(some) = self.ask(name, "read", bytes.try_next())? {
            each(&some)?;
        }
        Ok(())
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, i64)>> {
        let listed = self.ask(prefix, "list", self.store.list(Some(&Path::from(prefix))).try_collect::<Vec<_>>())?;
        let put_ns = |found: &ObjectMeta| found.last_modified.timestamp_nanos_opt().unwrap_or_default();
        Ok(listed.iter().map(|found| (found.location.to_string(), put_ns(found))).collect())
    }

    fn delete(&self, name: &str) -> Result<()> {
        match self.ask(name, "delete", self.store.delete(&Path::from(name))) {
            Err(Error::Missing(_)) => Ok(()),
            result => result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_that_is_listed_in_another_way_is_known() {
        let wrong = ["~ann/run", "run//7", "r\u{fc}n", "a/100%", "run[1]"];
        assert!(!wrong.into_iter().any(is_listed_as_written));
        assert!(is_listed_as_written("team-1/run_7.a"));
    }

    #[test]
    fn a_number_in_an_address_is_no_throttling() {
        let told = |words: &str| told(object_store::Error::Generic { store: "S3", source: words.into() }, "x", "write");
        assert!(matches!(told("error sending request for url (http://h/503/429/TooMany)"), Error::Away(_)));
        for busy in BUSY {
            assert!(
                matches!(told(&format!("status {busy}: <Error><Code>{busy}</Code></Error>")), Error::Busy(_)),
                "{busy}"
            );
        }
    }

    #[test]
    fn the_words_of_a_server_have_no_keys() {
        let text = "status 403: <?xml version=\"1.0\"?> <Error><Code>InvalidToken</Code><Message>It is malformed.</Message>\
                    <AWSAccessKeyId>AKIA7</AWSAccessKeyId><Token-0>FwoG</Token-0></Error>";
        assert_eq!(in_words(text), "status 403: InvalidToken: It is malformed.");
        assert_eq!(in_words("<Error><Code>cut o"), "");
        assert_eq!(in_words("connection refused"), "connection refused");
    }
}
