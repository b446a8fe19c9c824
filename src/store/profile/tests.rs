use proptest::prelude::*;

use super::*;
use crate::store::Settings;

fn settings(rules: &str) -> Result<Settings, String> {
    let text = format!(
        "format = 2\nstore = \"{}\"\ndefault_profile = \"compact\"\ncache_mib = 1\n{rules}",
        crate::store::Id([7; 16])
    );
    Settings::parse(&text).map_err(|error| error.to_string())
}

fn profile() -> impl Strategy<Value = Profile> {
    proptest::sample::select(Profile::ALL.to_vec())
}

#[test]
fn the_first_rule_that_matches_path_and_role_decides() {
    let settings = settings(
        "expected_restores = 7\n\
         [[profile]]\nglob = \"run/*\"\nrole = \"ema\"\nprofile = \"exact\"\nexpected_restores = 0\n\
         [[profile]]\nglob = \"RUN/**\"\nrole = [\"ema\", \"second_moment\"]\nprofile = \"balanced\"\n\
         [[profile]]\nrole = \"other\"\nprofile = \"exact\"\n",
    )
    .unwrap();
    let profiles = settings.profiles(Path::new("run/step_1.pt"));
    assert_eq!(profiles.of(Role::Ema), Profile::Exact);
    assert_eq!(profiles.of(Role::SecondMoment), Profile::Balanced);
    assert_eq!(profiles.of(Role::Weight), Profile::Compact);
    assert_eq!(profiles.of(Role::Other), Profile::Exact);
    assert_eq!(profiles.words(), "compact; exact: other, ema; balanced: second_moment");
    assert_eq!(profiles.expected_restores(), Some(7));
    assert_eq!(profiles.coarsest(), Profile::Compact);
    // Only directly in the directory, not below.
    assert_eq!(settings.profiles(Path::new("run/a/step_1.pt")).of(Role::Ema), Profile::Balanced);
    assert_eq!(settings.profiles(Path::new("x.pt")).words(), "compact; exact: other");
    assert_eq!(profiles.overridden(Profile::Balanced).words(), "balanced");
    // One restore more than the rule for averages expects; exact stays exact. All others expect seven.
    assert_eq!(profiles.in_force(8).of(Role::Weight), Profile::Exact);
    assert_eq!(profiles.in_force(7).of(Role::Weight), Profile::Balanced);
}

#[test]
fn what_cannot_be_meant_is_refused_in_words() {
    let rule = |text: &str| settings(&format!("[[profile]]\nprofile = \"exact\"\n{text}\n")).unwrap_err();
    assert!(rule("role = \"wieght\"").contains("write weight, optimizer"));
    assert!(rule("role = []").contains("leave `role` out"));
    assert!(rule("glob = \"a[\"").contains("glob"));
    assert!(rule("expected_restores = -1").contains("expected_restores"));
    assert!(settings("[[profile]]\nglob = \"a\"\nprofile = \"tiny\"\n").unwrap_err().contains("tiny"));
    assert!("Balanced".parse::<Profile>().unwrap_err().contains("exact, balanced or compact"));
}

#[test]
fn the_table_is_what_is_promised() {
    use Profile::{Balanced, Compact, Exact};
    for (expected, planned, exceeded) in [
        (0, Compact, Balanced),
        (5, Compact, Balanced),
        (6, Balanced, Exact),
        (20, Balanced, Exact),
        (21, Exact, Exact),
    ] {
        assert_eq!(Profile::in_force(Compact, Some(expected), expected), planned, "{expected}");
        assert_eq!(Profile::in_force(Compact, Some(expected), expected + 1), exceeded, "{expected}");
    }
    assert_eq!(Profile::in_force(Compact, Some(1), 20), Balanced);
    assert_eq!(Profile::in_force(Compact, Some(1), 21), Exact);
    assert_eq!(Profile::in_force(Compact, None, 1000), Compact);
}

proptest! {
    #[test]
    fn restores_only_ever_make_it_finer(
        asked in profile(), other in profile(), expected in 0u32..40, seen in 0u32..60, more in 0u32..60,
    ) {
        let used = Profile::in_force(asked, Some(expected), seen);
        prop_assert!(used <= asked);
        prop_assert!(Profile::in_force(asked, Some(expected), seen.saturating_add(more)) <= used);
        // A larger expectation from the start never gives a coarser profile, as long as neither is exceeded.
        if seen <= expected {
            prop_assert!(Profile::in_force(asked, Some(expected.saturating_add(more)), seen) <= used);
            prop_assert!(f64::from(expected) * used.iterations_per_restore() <= BUDGET);
        } else {
            prop_assert!(used < asked || used == Profile::Exact);
            prop_assert!(f64::from(seen) * used.iterations_per_restore() <= BUDGET);
        }
        // A request for a finer profile never gives a coarser one.
        let (finer, coarser) = (asked.min(other), asked.max(other));
        prop_assert!(
            Profile::in_force(finer, Some(expected), seen) <= Profile::in_force(coarser, Some(expected), seen)
        );
        prop_assert_eq!(Profile::in_force(asked, None, seen), asked);
    }
}
