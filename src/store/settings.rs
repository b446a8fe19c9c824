//! `stepfs.toml`: format version, store id, and the users' choices.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Error;
use super::object::Id;
use super::profile::{self, Profile, Profiles};
use super::retention::{self, RuleText};
use crate::terminal::format::parse_size;

/// Version of the store's layout and records: the only one that this program reads and writes.
pub const FORMAT: u32 = 2;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    format: u32,
    store: String,
    default_profile: Profile,
    cache_mib: u64,
    #[serde(default)]
    shared: bool,
    #[serde(default = "default_settle")]
    settle_seconds: u64,
    reserve: Option<toml::Value>,
    expected_restores: Option<u32>,
    trash_for: Option<String>,
    #[serde(default, rename = "profile")]
    profiles: Vec<profile::RuleText>,
    #[serde(default)]
    retention: Vec<RuleText>,
    mirror: Option<MirrorSettings>,
}

/// The keys that stand above the first table. A line at the end of the file belongs to the last table.
const TOP: [&str; 9] = [
    "format", "store", "shared", "default_profile", "cache_mib", "settle_seconds", "reserve", "expected_restores",
    "trash_for",
];

fn above_tables(key: &str) -> String {
    format!("\nA line after a [table] belongs to that table: move `{key}` above the first line that begins with `[`.")
}

/// Ten minutes: longer than any checkpoint takes to be written, and short enough for users who wait for space.
fn default_settle() -> u64 {
    600
}

/// How the newest file of a lineage travels to a mirror.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Newest {
    /// At once, as the object that it becomes.
    Quantized,
    /// Lossless, at once.
    #[default]
    Exact,
    /// Not before it is archived.
    None,
}

/// The mirror of a store (`[mirror]`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorSettings {
    /// `file:///DIRECTORY` or `s3://BUCKET/PREFIX`.
    pub url: String,
    /// How the newest file of a lineage travels.
    #[serde(default)]
    pub newest: Newest,
    /// Limit in MiB a second; none by default.
    pub bandwidth_mib: Option<f64>,
    /// How long older states stay, such as `7d`.
    #[serde(default = "default_keep")]
    pub keep_manifests: String,
}

/// A week: who removed something before a weekend or a holiday comes back within it.
fn default_keep() -> String {
    "7d".into()
}

impl MirrorSettings {
    /// [`MirrorSettings::keep_manifests`] as a time.
    ///
    /// # Errors
    /// [`Error::Settings`]: it is none.
    pub fn keep(&self) -> Result<Duration, Error> {
        let wrong = |_| Error::Settings("keep_manifests is no time; write 12h or 7d".into());
        retention::duration(&self.keep_manifests).map(Duration::from_nanos).map_err(wrong)
    }
}

#[derive(Deserialize)]
struct FormatOnly {
    format: u32,
}

/// The settings of a store.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The store's id.
    pub id: Id,
    /// Limit of `cache/`, bytes.
    pub cache_bytes: u64,
    /// Several daemons may serve it at the same time.
    pub shared: bool,
    /// How long the files of a checkpoint directory wait for each other; zero: not at all.
    pub settle: Duration,
    /// Room on the store's disk that programs leave to the archive while it is at work, bytes. `None`: a checkpoint as
    /// large as the largest one.
    pub reserve: Option<u64>,
    /// The mirror, if there is one.
    pub mirror: Option<MirrorSettings>,
    /// How long removed files stay in the trash; none: `rm` removes them.
    pub trash_for: Option<Duration>,
    profiles: profile::Rules,
    retention: Vec<retention::Rule>,
}

/// The `stepfs.toml` of a new store.
pub(super) fn template(id: Id, shared: bool) -> String {
    let shared = if shared {
        "# Daemons on several machines may serve it at the same time (docs/MACHINES.md).\n\
         shared = true\n"
    } else {
        ""
    };
    format!(
        "# Settings of a stepfs store. A mount reads them when it starts; edit them while it is not mounted.\n\
         format = {FORMAT}\n\
         store = \"{id}\"\n\
         {shared}\n\
         # How faithfully a checkpoint is kept once a newer one of its lineage is durable:\n\
         #   exact     bit-exact\n\
         #   balanced  a restore should cost half an iteration of training\n\
         #   compact   a restore should cost up to two iterations\n\
         # or a published system, for comparison: lc-3, scar-5, topn-10, ... (`stepfs profile --help` lists them).\n\
         # `stepfs tune` finds the smallest one that is good enough by a score of your own. Data that stepfs does\n\
         # not understand is always bit-exact. `stepfs profile` sets another profile for a file or directory.\n\
         default_profile = \"balanced\"\n\
         \n\
         # How often training will be resumed from checkpoints of a run. With it, a run that is resumed often is kept\n\
         # more faithfully: compact up to 5 expected restores, balanced up to 20, exact beyond. A lineage that was\n\
         # restored more often than expected continues with the next finer profile.\n\
         # expected_restores = 3\n\
         \n\
         # Space for decoded copies of released files that are being read, in MiB. Safe to lose at any time.\n\
         cache_mib = 10240\n\
         \n\
         # A checkpoint directory (checkpoint-20/...) stays exact until each of its files has a newer state, so that\n\
         # training can continue from it if the next one is never finished. If some file gets no newer state, the\n\
         # others wait for it: without a limit if it holds weights or an optimizer's state, else this long. 0: no\n\
         # file waits.\n\
         settle_seconds = {settle}\n\
         \n\
         # With less free room on the disk than this, superseded files do not even wait that long, and the trash is\n\
         # emptied. A save waits while stepfs frees room. By default the size of the largest checkpoint.\n\
         # reserve = \"20 GB\"\n\
         \n\
         # Keeps files that `rm` removes for so long in .stepfs-trash/, below the mount: s, m, h, d, w. Their room is free\n\
         # only then, or after an `rm` there.\n\
         # trash_for = \"1d\"\n\
         \n\
         # The first matching rule decides. Its glob must match the path inside the mount (ignoring case), and its\n\
         # roles, if it has any, must include the tensor's. A rule may have its own expected_restores.\n\
         [[profile]]\n\
         glob = \"**/*{{best,final}}*\"\n\
         profile = \"exact\"\n\
         \n\
         [[profile]]\n\
         glob = \"**/*{{best,final}}*/**\"\n\
         profile = \"exact\"\n\
         \n\
         # Roles: weight, first_moment, second_moment, momentum, square_sum, ema, master, optimizer (its other\n\
         # state), other.\n\
         # [[profile]]\n\
         # glob = \"run/**\"\n\
         # role = [\"ema\", \"master\"]\n\
         # profile = \"exact\"\n\
         \n\
         # Retention: removes checkpoints by these rules, and none without a rule; `stepfs gc --dry-run` tries them.\n\
         # A glob matches checkpoints that are one file (\"run/*.pt\") or one directory (\"run/checkpoint-*\"). The\n\
         # first matching rule decides. Checkpoints that differ only in their step are one series. A checkpoint\n\
         # stays if any line keeps it, and always if it is the newest complete one or pinned.\n\
         # [[retention]]\n\
         # glob = \"**/checkpoint-*\"\n\
         # keep_last = 3            # the three newest complete ones\n\
         # keep_every = 1000        # those whose step is a multiple of 1000\n\
         # keep_for = \"7d\"          # those younger than that: s, m, h, d, w\n\
         # ElasticDL's version directories, valid when all shards are there; 0 keeps all:\n\
         # keep_checkpoint_max = 5\n\
         \n\
         # A mirror that has what this store has, seconds later (docs/MIRROR.md). Credentials come from the environment,\n\
         # never from here.\n\
         # [mirror]\n\
         # url = \"s3://bucket/run-7\"   # or file:///directory on another file system\n\
         # newest = \"exact\"            # or quantized: a few percent of its bytes; or none: not before it is archived\n\
         # keep_manifests = \"7d\"       # how long older states stay: s, m, h, d, w\n\
         # bandwidth_mib = 100         # MiB a second, at most\n",
        settle = default_settle(),
    )
}

impl Settings {
    /// The profile of files that no rule and no mark matches.
    pub fn default_profile(&self) -> Profile {
        self.profiles.otherwise()
    }

    /// Parses the text of `stepfs.toml`.
    ///
    /// # Errors
    /// [`Error::Format`] if another version of stepfs made the store; [`Error::Settings`] with the parser's message.
    pub fn parse(text: &str) -> Result<Settings, Error> {
        let wrong = |error: toml::de::Error| {
            let said = error.to_string().trim_end().to_string();
            let misplaced = TOP.iter().find(|key| said.contains(&format!("unknown field `{key}`")));
            Error::Settings(said + &misplaced.map_or(String::new(), |key| above_tables(key)))
        };
        let FormatOnly { format } = toml::from_str(text).map_err(wrong)?;
        if format != FORMAT {
            return Err(Error::Format { root: PathBuf::new(), found: format });
        }
        let document: Document = toml::from_str(text).map_err(wrong)?;
        // A line at the end of a new file belongs to such a rule, and has no effect there.
        if document.profiles.iter().any(profile::RuleText::has_restores_of_exact) {
            let words = "a [[profile]] that keeps files exact has `expected_restores`, which has no effect there.";
            return Err(Error::Settings(words.to_string() + &above_tables("expected_restores")));
        }
        let id = document.store.parse().map_err(|()| Error::Settings("`store` is not 32 hexadecimal digits".into()))?;
        let profiles = profile::Rules::parse(document.profiles, document.default_profile, document.expected_restores)
            .map_err(Error::Settings)?;
        let retention = retention::parse(document.retention).map_err(Error::Settings)?;
        let no_time = |_| Error::Settings("trash_for is no time; write 12h or 7d".into());
        let trash_for = document.trash_for.as_deref().map(retention::duration).transpose().map_err(no_time)?;
        let size = |value: &toml::Value| {
            let bytes = value.as_str().and_then(|text| {
                let bytes = parse_size(&text.replace(' ', "")).ok()?;
                // So many bytes without a unit are meant otherwise.
                (bytes == 0 || bytes >= 1 << 20 || text.ends_with(|c: char| c.is_ascii_alphabetic())).then_some(bytes)
            });
            bytes.ok_or_else(|| Error::Settings(format!("reserve = {value} is no size; write \"20 GB\"")))
        };
        let reserve = document.reserve.as_ref().map(size).transpose()?;
        if let Some(mirror) = &document.mirror {
            mirror.keep()?;
            if mirror.bandwidth_mib.is_some_and(|rate| !rate.is_finite() || rate <= 0.0) {
                return Err(Error::Settings("bandwidth_mib is not above 0; leave it out for no limit".into()));
            }
        }
        let also = document.mirror.as_ref().map(|_| "[mirror]").or(trash_for.map(|_| "trash_for"));
        if let Some(also) = also.filter(|_| document.shared) {
            return Err(Error::Settings(format!(
                "{also} does not work with `shared = true` yet; leave one of them out"
            )));
        }
        Ok(Settings {
            retention,
            trash_for: trash_for.map(Duration::from_nanos),
            reserve,
            mirror: document.mirror,
            id,
            shared: document.shared,
            settle: Duration::from_secs(document.settle_seconds),
            cache_bytes: document.cache_mib.saturating_mul(1 << 20),
            profiles,
        })
    }

    /// The text with another default profile, all else as its user wrote it.
    ///
    /// # Errors
    /// [`Error::Settings`] if the setting has no line of its own.
    pub fn with_default_profile(text: &str, profile: Profile) -> Result<String, Error> {
        let is_it = |line: &str| line.split_once('=').is_some_and(|(key, _)| key.trim() == "default_profile");
        let is_top = |line: &&str| !line.trim_start().starts_with('[');
        let mut at = 0;
        let lines = text.split_inclusive('\n').take_while(is_top).map(|line| {
            at += line.len();
            at - line.len()..at
        });
        let found = lines.into_iter().find(|range| is_it(&text[range.clone()]));
        let range = found.ok_or_else(|| Error::Settings("`default_profile` has no line of its own".into()))?;
        // No profile has a `#` in its name, so a `#` starts a comment.
        let old = &text[range.clone()];
        let remark = old.find('#').map_or_else(String::new, |at| format!(" {}", old[at..].trim_end()));
        let mut changed = text.to_string();
        changed.replace_range(range, &format!("default_profile = \"{}\"{remark}\n", profile.name()));
        Settings::parse(&changed).map(|_| changed)
    }

    /// The text with a mirror, all else as its user wrote it.
    ///
    /// # Errors
    /// [`Error::Settings`] if there is another mirror.
    pub fn with_mirror(text: &str, url: &str) -> Result<String, Error> {
        match Settings::parse(text)?.mirror {
            Some(mirror) if mirror.url == url => return Ok(text.to_string()),
            Some(mirror) => {
                let words = format!("the store's mirror is {}; change `url` in [mirror] there", mirror.url);
                return Err(Error::Settings(words));
            }
            None => {}
        }
        let changed = format!("{}\n\n[mirror]\nurl = {}\n", text.trim_end(), toml::Value::from(url));
        Settings::parse(&changed).map(|_| changed)
    }

    /// The retention rules; none unless a user wrote some.
    pub fn retention(&self) -> &[retention::Rule] {
        &self.retention
    }

    /// The profiles that the rules give for a path inside the mount.
    pub fn profiles(&self, path: &std::path::Path) -> Profiles {
        self.profiles.of(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_new_store_keeps_best_and_final_exact() {
        let settings = Settings::parse(&template(Id([7; 16]), false)).unwrap();
        for path in ["best.pt", "run/Model_BEST.ckpt", "final/model.safetensors", "a/b/x-final-2/optimizer.pt"] {
            assert_eq!(settings.profiles(Path::new(path)).coarsest(), Profile::Exact, "{path}");
        }
        for path in ["step_1.pt", "run/checkpoint-5/model.safetensors"] {
            assert_eq!(settings.profiles(Path::new(path)).words(), "balanced", "{path}");
            assert_eq!(settings.profiles(Path::new(path)).expected_restores(), None, "{path}");
        }
    }

    #[test]
    fn a_reserve_is_a_size() {
        let with = |value: &str| Settings::parse(&format!("reserve = {value}\n{}", template(Id([7; 16]), false)));
        assert_eq!(with("\"20 GB\"").unwrap().reserve, Some(20 << 30));
        assert_eq!(with("\"1 KB\"").unwrap().reserve, Some(1 << 10));
        assert!(with("\"20\"").is_err() && with("\"0\"").unwrap().reserve == Some(0));
        assert_eq!(Settings::parse(&template(Id([7; 16]), false)).unwrap().reserve, None);
        for wrong in ["20", "\"much\"", "\"-1 GB\"", "\"\"", "true"] {
            assert!(with(wrong).is_err_and(|error| error.to_string().contains("is no size")), "{wrong}");
        }
    }

    #[test]
    fn the_default_profile_can_be_changed_and_nothing_else() {
        let text = template(Id([7; 16]), false);
        let changed = Settings::with_default_profile(&text, "lc-3".parse().unwrap()).unwrap();
        assert_eq!(Settings::parse(&changed).unwrap().profiles(Path::new("step_1.pt")).words(), "lc-3");
        assert_eq!(Settings::with_default_profile(&changed, Profile::Balanced).unwrap(), text);
        let remarked = text.replacen("\"balanced\"\n", "\"balanced\" # ours\n", 1);
        let changed =
            Settings::with_default_profile(&remarked, "inshrinkerator-12bins-prune30".parse().unwrap()).unwrap();
        assert!(changed.contains("\ndefault_profile = \"inshrinkerator-12bins-prune30\" # ours\n"), "{changed}");
        let mentioned = text.replacen("format = ", "# default_profile = \"balanced\"\nformat = ", 1);
        let changed = Settings::with_default_profile(&mentioned, Profile::Compact).unwrap();
        assert_eq!(Settings::parse(&changed).unwrap().profiles(Path::new("step_1.pt")).words(), "compact");
        let without = text.replacen("default_profile", "[x]\ndefault_profile", 1);
        assert!(matches!(Settings::with_default_profile(&without, Profile::Exact), Err(Error::Settings(_))));
    }

    #[test]
    fn the_examples_of_profiles_are_what_they_say() {
        let text = template(Id([7; 16]), false);
        let lines: Vec<&str> = text.lines().collect();
        let at = lines.iter().position(|line| *line == "# [[profile]]").unwrap();
        let uncomment = |(number, line): (usize, &&str)| match number {
            _ if (at..at + 4).contains(&number) || line.starts_with("# expected_restores =") => line[2..].to_string(),
            _ => line.to_string(),
        };
        let text = lines.iter().enumerate().map(uncomment).collect::<Vec<_>>().join("\n");
        let profiles = Settings::parse(&text).unwrap().profiles(Path::new("run/a/step_1.pt"));
        assert_eq!(profiles.words(), "balanced; exact: ema, master");
        assert_eq!(profiles.expected_restores(), Some(3));
    }

    #[test]
    fn retention_is_off_until_its_example_is_uncommented() {
        let text = template(Id([7; 16]), false);
        assert!(Settings::parse(&text).unwrap().retention().is_empty());
        let keys = ["[[retention]]", "glob = \"**/c", "keep_last", "keep_every", "keep_for", "keep_checkpoint"];
        let example = |line: &str| keys.iter().any(|key| line.starts_with(key));
        let uncomment = |line| match str::strip_prefix(line, "# ") {
            Some(rest) if example(rest) => rest,
            _ => line,
        };
        let text = text.lines().map(uncomment).collect::<Vec<_>>().join("\n");
        let settings = Settings::parse(&text).unwrap();
        let [rule] = settings.retention() else { panic!("{:?}", settings.retention()) };
        assert_eq!((rule.keep_last, rule.keep_every, rule.keep_checkpoint_max), (Some(3), Some(1000), Some(5)));
        assert!(matches!(Settings::parse(&text.replace("keep_every", "keep_evry")), Err(Error::Settings(_))));
    }

    #[test]
    fn a_mirror_is_added_once_and_never_exchanged() {
        let text = template(Id([7; 16]), false);
        assert!(Settings::parse(&text).unwrap().mirror.is_none());
        let url = "s3://bucket/a\"b";
        let changed = Settings::with_mirror(&text, url).unwrap();
        let mirror = Settings::parse(&changed).unwrap().mirror.unwrap();
        assert_eq!(
            (mirror.url.as_str(), mirror.newest, mirror.keep().ok()),
            (url, Newest::Exact, Some(Duration::from_secs(7 * 86_400)))
        );
        assert_eq!(Settings::with_mirror(&changed, url).unwrap(), changed);
        assert!(Settings::with_mirror(&changed, "file:///x").unwrap_err().to_string().contains(url));
        let example = |line: &str| {
            ["[mirror]", "url =", "newest =", "keep_manifests =", "bandwidth_mib ="]
                .iter()
                .any(|key| line.starts_with(key))
        };
        let uncomment = |line| match str::strip_prefix(line, "# ") {
            Some(rest) if example(rest) => rest,
            _ => line,
        };
        let text = text.lines().map(uncomment).collect::<Vec<_>>().join("\n");
        assert_eq!(Settings::parse(&text).unwrap().mirror.unwrap().bandwidth_mib, Some(100.0));
    }

    #[test]
    fn another_format_is_told_apart_from_a_broken_file() {
        for other in [1, 3] {
            let text =
                template(Id([7; 16]), false).replace("format = 2", &format!("format = {other}\nunheard_of = true"));
            assert!(matches!(Settings::parse(&text), Err(Error::Format { found, .. }) if found == other));
        }
        assert!(matches!(Settings::parse("format = \"x\""), Err(Error::Settings(_))));
    }
}
