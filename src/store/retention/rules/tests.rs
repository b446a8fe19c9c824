use super::*;

fn read(text: &str) -> Result<Vec<Rule>, String> {
    #[derive(Deserialize)]
    struct Document {
        retention: Vec<RuleText>,
    }
    let document: Document = toml::from_str(text).map_err(|error| error.to_string())?;
    parse(document.retention)
}

fn one(keys: &str) -> Result<Rule, String> {
    read(&format!("[[retention]]\n{keys}")).map(|mut rules| rules.remove(0))
}

#[test]
fn rules_are_read() {
    let rule = one("glob = \"run/checkpoint-*\"\nkeep_last = 3\nkeep_every = 1000\nkeep_for = \"7d\"").unwrap();
    assert_eq!((rule.keep_last, rule.keep_every, rule.keep_checkpoint_max), (Some(3), Some(1000), None));
    assert_eq!(rule.keep_for, Some((7 * 86_400_000_000_000, "7d".into())));
    for (text, seconds) in [("0s", 0), ("90s", 90), ("5m", 300), ("2h", 7200), ("1w", 604_800), (" 1d ", 86_400)] {
        let rule = one(&format!("glob = \"*\"\nkeep_for = \"{text}\"")).unwrap();
        assert_eq!(rule.keep_for.unwrap().0, seconds * 1_000_000_000, "{text}");
    }
    // Absurd, but meaningful: it keeps all.
    assert_eq!(one("glob = \"*\"\nkeep_last = 9223372036854775807").unwrap().keep_last, Some(i64::MAX as u64));
    assert_eq!(one("glob = \"*\"\nkeep_checkpoint_max = 0").unwrap().keep_checkpoint_max, Some(0));
}

#[test]
fn what_cannot_be_meant_is_refused_in_words() {
    for (keys, word) in [
        ("glob = \"*\"", "it keeps nothing"),
        ("keep_last = 1", "glob"),
        ("glob = \"\"\nkeep_last = 1", "a glob is needed"),
        ("glob = \"/\"\nkeep_last = 1", "a glob is needed"),
        ("glob = \"/run/*\"\nkeep_last = 1", "inside the mount"),
        ("glob = \"../*\"\nkeep_last = 1", "inside the mount"),
        ("glob = \"a[\"\nkeep_last = 1", "a["),
        ("glob = \"*\"\nkeep_last = 0", "always stays"),
        ("glob = \"*\"\nkeep_last = -1", "-1"),
        ("glob = \"*\"\nkeep_last = \"3\"", "keep_last"),
        ("glob = \"*\"\nkeep_every = 0", "multiple of 0"),
        ("glob = \"*\"\nkeep_lasts = 3", "keep_lasts"),
        ("glob = \"*\"\nkeep_last = 99999999999999999999", "keep_last"),
        ("glob = \"*\"\nkeep_for = \"-1d\"", "-1d"),
        ("glob = \"*\"\nkeep_for = \"+1d\"", "+1d"),
        ("glob = \"*\"\nkeep_for = \"7\"", "a whole number"),
        ("glob = \"*\"\nkeep_for = \"d\"", "a whole number"),
        ("glob = \"*\"\nkeep_for = \"\"", "a whole number"),
        ("glob = \"*\"\nkeep_for = \"1.5d\"", "a whole number"),
        ("glob = \"*\"\nkeep_for = \"7 days\"", "a whole number"),
        ("glob = \"*\"\nkeep_for = \"7\u{e9}\"", "a whole number"),
        ("glob = \"*\"\nkeep_for = \"99999999999w\"", "292 years"),
        ("glob = \"*\"\nkeep_for = \"99999999999999999999999s\"", "292 years"),
        ("glob = \"*\"\nkeep_for = 7", "keep_for"),
    ] {
        let error = one(keys).expect_err(keys);
        assert!(error.contains(word), "{keys}: {error}");
    }
}

#[test]
fn globs_match_as_those_of_profiles_do() {
    let matches = |glob: &str, path: &str, directory| {
        one(&format!("glob = {glob:?}\nkeep_last = 1")).unwrap().matches(Path::new(path), directory)
    };
    assert!(matches("run/checkpoint-*", "run/checkpoint-10", true));
    assert!(matches("run/checkpoint-*", "Run/Checkpoint-10", true));
    assert!(!matches("run/checkpoint-*", "run/checkpoint-10/model.pt", false), "a star stays in one name");
    assert!(!matches("checkpoint-*", "run/checkpoint-10", true));
    assert!(matches("**/global_step*", "global_step1", true) && matches("**/global_step*", "a/b/global_step1", true));
    assert!(matches("checkpoint-*/", "checkpoint-1", true) && !matches("checkpoint-*/", "checkpoint-1", false));
}

#[test]
fn a_glob_that_spells_nothing_is_wild() {
    for (glob, wild) in [("*", true), ("run/*", true), ("**", true), ("*-*", true), ("exp*", false), ("*/exp?", false)]
    {
        assert_eq!(one(&format!("glob = {glob:?}\nkeep_last = 1")).unwrap().is_wild(), wild, "{glob}");
    }
}
