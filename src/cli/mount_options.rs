//! Options of a mount as in `/etc/fstab` and `mount -o`: words between commas.

use std::path::PathBuf;

use crate::fs::KernelOption;
use crate::store::Profile;

use super::format::{self, parse_size};

/// Options without effect. They are true of every stepfs mount, need nothing, or are meant for mount(8) or systemd. The
/// mount is always `nosuid` and `nodev`. The store's file system handles access times.
const WITHOUT_EFFECT: &str = "defaults rw suid nosuid dev nodev exec async atime diratime nodiratime relatime \
     norelatime strictatime nostrictatime lazytime nolazytime iversion noiversion mand nomand silent loud auto noauto \
     nouser users nousers owner noowner group nogroup fail nofail _netdev comment uhelper helper \
     default_permissions";
/// Options without effect that cancel an earlier option.
const OPPOSITES: [(&str, KernelOption); 4] = [
    ("rw", KernelOption::ReadOnly),
    ("exec", KernelOption::NoExec),
    ("atime", KernelOption::NoAtime),
    ("async", KernelOption::Sync),
];

/// The options of a mount: words of a list, and flags of `stepfs mount`, which have these comments as help.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Options {
    /// Let other users in, as far as modes permit.
    #[arg(long)]
    pub(super) allow_other: bool,
    /// Serve every read and write in the daemon, as without CAP_SYS_ADMIN.
    #[arg(long)]
    pub(super) no_passthrough: bool,
    /// Make this the store's default profile (`default_profile` in its stepfs.toml): exact, balanced, compact, or a
    /// published system such as lc-3. Rules there and `stepfs profile` take precedence.
    #[arg(long, value_name = "NAME")]
    pub(super) profile: Option<Profile>,
    /// Memory for decoded states, which speed up the encoding of the next checkpoint: bytes, or with K, M, G.
    /// 0 for none [default: a tenth of the memory of the machine, or of the daemon's control group; at most 2G].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(super) memory: Option<u64>,
    /// Keep what the store has also there, seconds later: file:///DIRECTORY or s3://BUCKET/PREFIX. The store's stepfs.toml
    /// keeps the URL. Credentials come from the environment.
    #[arg(long, value_name = "URL")]
    pub(super) mirror: Option<String>,
    /// Make a store that daemons on several machines may mount at the same time. Only when the store is made: later mounts
    /// need no option.
    #[arg(long)]
    pub(super) shared: bool,
    /// Log file of the daemon [default: STORE/daemon.log; of a shared store daemon.log in the daemon's own directory there].
    #[arg(long)]
    pub(super) log: Option<PathBuf>,
    /// Serve as this user, if root mounts.
    #[arg(skip)]
    pub(super) user: Option<String>,
    /// Create the store if missing.
    #[arg(skip)]
    pub(super) create: bool,
    #[arg(skip)]
    pub(super) kernel: Vec<KernelOption>,
    /// Unknown options.
    #[arg(skip)]
    pub(super) unknown: Vec<String>,
}

impl Options {
    /// Parses a list. Unknown options are no error here.
    ///
    /// # Errors
    /// A value is wrong; the message names it.
    pub(super) fn lenient(list: &str) -> Result<Options, String> {
        let mut options = Options::default();
        options.add(list).map(|()| options)
    }

    /// Parses a list.
    ///
    /// # Errors
    /// An option is unknown or a value is wrong; the message names it.
    pub(super) fn strict(list: &str) -> Result<Options, String> {
        let options = Options::lenient(list)?;
        match options.unknown.first() {
            Some(word) => Err(unknown(word)),
            None => Ok(options),
        }
    }

    /// Checks a list for clap.
    ///
    /// # Errors
    /// As of [`Options::strict`].
    pub(super) fn checked(list: &str) -> Result<String, String> {
        Options::strict(list).map(|_| list.to_string())
    }

    /// Adds the options of a list. The last word of an option counts. Unknown options are no error here.
    ///
    /// # Errors
    /// A value is wrong; the message names it.
    pub(super) fn add(&mut self, list: &str) -> Result<(), String> {
        split(list).iter().filter(|word| !word.is_empty()).try_for_each(|word| self.take(word))
    }

    /// Those that the daemon needs, as a list. The store and the command that starts it have all others.
    pub(super) fn of_daemon(&self) -> String {
        let word = |wanted: &KernelOption| KernelOption::ALL.iter().find(|(_, option)| option == wanted);
        let mut words: Vec<String> = self.kernel.iter().filter_map(word).map(|(word, _)| word.to_string()).collect();
        words.extend(self.allow_other.then(|| "allow_other".into()));
        words.extend(self.no_passthrough.then(|| "no_passthrough".into()));
        words.extend(self.memory.map(|bytes| format!("memory={bytes}")));
        words.join(",")
    }

    fn take(&mut self, word: &str) -> Result<(), String> {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        let wants = |what: &str| {
            value.filter(|value| !value.is_empty()).ok_or(format!("option {name} takes a value: {name}={what}"))
        };
        let flag = || if value.is_some() { Err(format!("option {name} takes no value")) } else { Ok(true) };
        if let Some((_, option)) = KernelOption::ALL.iter().find(|(known, _)| *known == name) {
            flag()?;
            self.kernel.retain(|had| had != option);
            self.kernel.push(*option);
            return Ok(());
        }
        // Users write both `-` and `_`.
        match name.replace('-', "_").as_str() {
            "allow_other" => self.allow_other = flag()?,
            "no_passthrough" => self.no_passthrough = flag()?,
            "create" => self.create = flag()?,
            "shared" => self.shared = flag()?,
            // Without a name it is mount(8)'s: any user may mount.
            "user" => self.user = value.map(String::from),
            "profile" => {
                self.profile = Some(wants("compact")?.parse().map_err(|error| format!("option profile: {error}"))?)
            }
            "memory" => {
                self.memory = Some(parse_size(wants("512M")?).map_err(|error| format!("option memory: {error}"))?)
            }
            "mirror" => self.mirror = Some(wants("s3://bucket/run-7")?.to_string()),
            "log" => self.log = Some(PathBuf::from(wants("/var/log/stepfs.log")?)),
            _ if WITHOUT_EFFECT.split(' ').any(|known| known == name) => {
                let opposite = OPPOSITES.iter().find(|(word, _)| *word == name);
                self.kernel.retain(|had| opposite.is_none_or(|(_, option)| had != option));
            }
            _ if name.starts_with("x-") || name.starts_with("X-") => {}
            _ => self.unknown.push(name.to_string()),
        }
        Ok(())
    }
}

/// Splits a list at commas. A comma in double quotes belongs to the word.
fn split(list: &str) -> Vec<String> {
    let (mut words, mut quoted) = (vec![String::new()], false);
    for c in list.chars() {
        match (c, words.last_mut()) {
            ('"', _) => quoted = !quoted,
            (',', _) if !quoted => words.push(String::new()),
            (c, Some(word)) => word.push(c),
            (_, None) => {}
        }
    }
    words
}

fn unknown(word: &str) -> String {
    let word = format::name(word);
    match word.as_str() {
        "remount" => {
            "option remount: stepfs cannot change a mount; unmount it and mount it again with the new options".into()
        }
        _ => format!(
            "unknown option {word}; stepfs has allow_other, no_passthrough, user=NAME, create, shared, profile=NAME, memory=SIZE, \
             mirror=URL and log=FILE, and those that mount(8) describes for all file systems"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_fstab_is_understood() {
        let line = "rw,nosuid,user=me,x-systemd.automount,X-mount.mkdir,allow_other,noatime,profile=compact,memory=1G,\
                    log=\"/a,b\"";
        let options = Options::strict(line).unwrap();
        assert!(options.allow_other && !options.no_passthrough && !options.create);
        assert_eq!(options.of_daemon(), "noatime,allow_other,memory=1073741824");
        assert_eq!(options.profile, Some(Profile::Compact));
        assert_eq!((options.memory, options.log), (Some(1 << 30), Some(PathBuf::from("/a,b"))));
        assert!(Options::strict("").unwrap().kernel.is_empty());
    }

    #[test]
    fn the_last_word_counts() {
        assert_eq!(Options::strict("ro,rw,noexec,noatime,ro,atime").unwrap().of_daemon(), "noexec,ro");
        let mut options = Options::strict("ro,noexec").unwrap();
        options.add("rw,sync").unwrap();
        assert_eq!(options.of_daemon(), "noexec,sync");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (list, name) in [
            ("ro,alow_other", "alow_other"),
            ("foo=bar", "foo"),
            ("remount,ro", "remount"),
            ("profile", "profile="),
            ("memory=lots", "memory"),
            ("profile=none", "none"),
            ("allow_other=1", "allow_other"),
        ] {
            let error = Options::strict(list).unwrap_err();
            assert!(error.contains(name), "{list}: {error}");
        }
        assert_eq!(Options::lenient("foo=bar,ro").unwrap().unknown, ["foo"]);
    }
}
