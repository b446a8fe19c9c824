//! Profiles: how faithfully a file is kept once a newer one of its lineage is durable, who decides, and how restores
//! change that.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::Path;
use std::str::FromStr;

use globset::{GlobBuilder, GlobMatcher};
use serde::{Deserialize, Serialize};

use formats::Role;
use papers::Policy;
use papers::registry::SystemId;

/// How faithfully a file, or a tensor of it, is kept. A finer profile compares as smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Profile {
    /// Lossless.
    Exact,
    /// A restore should cost half an iteration of training; docs/QUALITY.md has the measured cost.
    Balanced,
    /// A restore should cost up to two iterations of training.
    Compact,
    /// Models by a published system, everything else lossless. The user who chooses it must know its cost. It is
    /// neither finer nor coarser than the others, and restores do not change it, unless the system defines how.
    Published(SystemId),
}

/// Iterations that all restores of a run may cost together. At half an iteration each that is 20 restores, as many as
/// Check-N-Run (section 6.2.1) allows its 4 bits. For a run of a thousand iterations it is one hundredth.
const BUDGET: f64 = 10.0;

impl Profile {
    /// stepfs's own profiles, finest first.
    pub const ALL: [Profile; 3] = [Profile::Exact, Profile::Balanced, Profile::Compact];

    /// The name in `stepfs.toml`, in attributes and in `stepfs ls`.
    pub fn name(self) -> Cow<'static, str> {
        match self {
            Profile::Exact => "exact".into(),
            Profile::Balanced => "balanced".into(),
            Profile::Compact => "compact".into(),
            Profile::Published(system) => system.to_string().into(),
        }
    }

    /// The published system, if it is one.
    pub fn system(self) -> Option<SystemId> {
        match self {
            Profile::Published(system) => Some(system),
            _ => None,
        }
    }

    /// True if data kept under this profile is as faithful as the other profile demands.
    pub fn is_as_fine_as(self, other: Profile) -> bool {
        self == other || self == Profile::Exact || self < other && other.system().is_none()
    }

    /// Maximum cost of a restore in iterations of training; a published system promises no number.
    pub fn iterations_per_restore(self) -> f64 {
        match self {
            Profile::Exact => 0.0,
            Profile::Balanced => 0.5,
            Profile::Compact => 2.0,
            Profile::Published(_) => f64::INFINITY,
        }
    }

    /// The next finer profile.
    #[must_use]
    pub fn safer(self) -> Profile {
        match self {
            Profile::Exact | Profile::Balanced => Profile::Exact,
            Profile::Compact => Profile::Balanced,
            Profile::Published(_) => self,
        }
    }

    /// The coarsest profile that keeps this many restores within the budget of a run.
    pub fn bearing(restores: u32) -> Profile {
        let bears = |profile: &Profile| f64::from(restores) * profile.iterations_per_restore() <= BUDGET;
        Profile::ALL.into_iter().rev().find(bears).unwrap_or(Profile::Exact)
    }

    /// The profile to use for the requested one, the expected restores of a run, and the observed restores of the
    /// lineage. This is Check-N-Run's dynamic bit width (section 6.2.1). It picks the bits by the expected failures,
    /// and falls back to finer ones if more occur.
    ///
    /// | expected | as expected         | more than expected                        |
    /// |----------|---------------------|-------------------------------------------|
    /// | not set  | as requested        | as requested                              |
    /// | 0 to 5   | at most compact     | one finer; exact from the 21st restore on |
    /// | 6 to 20  | at most balanced    | exact                                     |
    /// | 21 ...   | exact               | exact                                     |
    ///
    /// Without an expectation nothing changes: most runs are resumed a few times, and their store must not grow
    /// eightfold for that.
    pub fn in_force(asked: Profile, expected: Option<u32>, seen: u32) -> Profile {
        let Some(expected) = expected else { return asked };
        if let Profile::Published(system) = asked {
            return Profile::Published(system.in_force(expected, seen));
        }
        let planned = asked.min(Profile::bearing(expected));
        match seen > expected {
            true => planned.safer().min(Profile::bearing(seen)),
            false => planned,
        }
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Profile, String> {
        if let Some(known) = Profile::ALL.into_iter().find(|profile| profile.name() == text) {
            return Ok(known);
        }
        let published = text.parse().map(Profile::Published);
        published.map_err(|why| match SystemId::begins(text) {
            true => format!("{why}; `stepfs help profile` lists all"),
            false => {
                format!(
                    "no profile is named {text:?}; write exact, balanced or compact (`stepfs help profile` has more)"
                )
            }
        })
    }
}

impl TryFrom<String> for Profile {
    type Error = String;

    fn try_from(text: String) -> Result<Profile, String> {
        text.parse()
    }
}

impl From<Profile> for String {
    fn from(profile: Profile) -> String {
        profile.name().into_owned()
    }
}

/// The request for one role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    profile: Profile,
    expected_restores: Option<u32>,
}

/// The profiles of one file, by role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profiles([Asked; Role::ALL.len()]);

impl Profiles {
    /// The same profile for all roles, without expected restores.
    pub fn all(profile: Profile) -> Profiles {
        Profiles([Asked { profile, expected_restores: None }; Role::ALL.len()])
    }

    /// The profile of the tensors with this role.
    pub fn of(&self, role: Role) -> Profile {
        self.0[role as usize].profile
    }

    /// The same profile for all roles; expected restores stay.
    #[must_use]
    pub fn overridden(&self, profile: Profile) -> Profiles {
        Profiles(self.0.map(|asked| Asked { profile, ..asked }))
    }

    /// The profiles to use after this many restores: [`Profile::in_force`].
    #[must_use]
    pub fn in_force(&self, seen: u32) -> Profiles {
        let each = |asked: Asked| {
            let profile = Profile::in_force(asked.profile, asked.expected_restores, seen);
            Asked { profile, ..asked }
        };
        Profiles(self.0.map(each))
    }

    /// Number of expected restores of the weights' checkpoints.
    pub fn expected_restores(&self) -> Option<u32> {
        self.0[Role::Weight as usize].expected_restores
    }

    /// How a published system chooses parents; `None` if no published system keeps the model.
    pub fn policy(&self) -> Option<Policy> {
        [Role::Weight, Role::Master].into_iter().find_map(|role| self.of(role).system()).map(|id| id.system().policy())
    }

    /// True if data kept under this profile is as faithful as every role demands.
    pub fn are_at_most_as_fine_as(&self, made: Profile) -> bool {
        self.0.iter().all(|asked| made.is_as_fine_as(asked.profile))
    }

    /// The coarsest of all roles.
    pub fn coarsest(&self) -> Profile {
        self.0.iter().map(|asked| asked.profile).max().unwrap_or(Profile::Exact)
    }

    /// The weights' profile, then the different ones: `balanced`, or `compact; exact: ema, second_moment`.
    pub fn words(&self) -> String {
        let weights = self.of(Role::Weight);
        let mut words = weights.name().to_string();
        let others: BTreeSet<Profile> = self.0.iter().map(|asked| asked.profile).collect();
        for profile in others.into_iter().filter(|profile| *profile != weights) {
            let roles = Role::ALL.into_iter().filter(|role| self.of(*role) == profile).map(Role::name);
            let roles = roles.collect::<Vec<_>>().join(", ");
            if !roles.is_empty() {
                words += &format!("; {}: {roles}", profile.name());
            }
        }
        words
    }
}

/// A `[[profile]]` table as written.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RuleText {
    #[serde(default = "anything")]
    glob: String,
    role: Option<Roles>,
    profile: Profile,
    expected_restores: Option<u32>,
}

impl RuleText {
    /// Whether it counts restores of files that are exact anyway.
    pub(super) fn has_restores_of_exact(&self) -> bool {
        self.profile == Profile::Exact && self.role.is_none() && self.expected_restores.is_some()
    }
}

/// The files that a glob of the settings matches. A `*` stays in its directory.
pub(super) fn glob(text: &str) -> Result<GlobMatcher, globset::Error> {
    Ok(GlobBuilder::new(text).case_insensitive(true).literal_separator(true).build()?.compile_matcher())
}

/// The glob of a rule without one.
fn anything() -> String {
    "**".into()
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Roles {
    One(String),
    Several(Vec<String>),
}

#[derive(Clone, Debug)]
struct Rule {
    glob: GlobMatcher,
    /// By role code; all roles if the rule names none.
    roles: [bool; Role::ALL.len()],
    profile: Profile,
    expected_restores: Option<u32>,
}

/// The rules of `stepfs.toml`. For a file and a role, the first rule that matches both decides.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    rules: Vec<Rule>,
    otherwise: Asked,
}

impl Rules {
    /// # Errors
    /// A rule is wrong; the message for the user names it.
    pub(super) fn parse(rules: Vec<RuleText>, profile: Profile, expected: Option<u32>) -> Result<Rules, String> {
        let rules = rules
            .into_iter()
            .map(|rule| {
                let glob = glob(&rule.glob).map_err(|error| format!("glob = {:?}: {error}", rule.glob))?;
                Ok(Rule {
                    glob,
                    roles: roles(rule.role)?,
                    profile: rule.profile,
                    expected_restores: rule.expected_restores.or(expected),
                })
            })
            .collect::<Result<_, String>>()?;
        Ok(Rules { rules, otherwise: Asked { profile, expected_restores: expected } })
    }

    /// The profile of a file that no rule matches.
    pub(super) fn otherwise(&self) -> Profile {
        self.otherwise.profile
    }

    pub(super) fn of(&self, path: &Path) -> Profiles {
        let rules: Vec<&Rule> = self.rules.iter().filter(|rule| rule.glob.is_match(path)).collect();
        Profiles(Role::ALL.map(|role| {
            let rule = rules.iter().find(|rule| rule.roles[role as usize]);
            rule.map_or(self.otherwise, |rule| Asked {
                profile: rule.profile,
                expected_restores: rule.expected_restores,
            })
        }))
    }
}

fn roles(named: Option<Roles>) -> Result<[bool; Role::ALL.len()], String> {
    let names = match named {
        None => return Ok([true; Role::ALL.len()]),
        Some(Roles::One(name)) => vec![name],
        Some(Roles::Several(names)) => names,
    };
    if names.is_empty() {
        return Err("role = []: the rule has no role; leave `role` out for all roles".into());
    }
    let mut roles = [false; Role::ALL.len()];
    for name in names {
        let role = Role::ALL
            .into_iter()
            .find(|role| role.name() == name)
            .ok_or_else(|| format!("role = {name:?} does not exist; write {}", Role::ALL.map(Role::name).join(", ")))?;
        roles[role as usize] = true;
    }
    Ok(roles)
}

#[cfg(test)]
mod tests;
