//! `stepfs.toml`: settings, profiles, retention.

use std::path::{Path, PathBuf};

use formats::Role;
use papers::registry::SystemId;
use stepfs::store::retention::{Kind, Own, Unit, plan};
use stepfs::store::{Profile, Settings};

use super::input::Input;

const PATHS: [&str; 5] = ["", "step_1.pt", "run/checkpoint-10/model.safetensors", "a/best/x", "\u{fffd}[*]{a,b}"];

/// Any text.
pub(crate) fn text(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(settings) = Settings::parse(text) else { return };
    for path in PATHS {
        let profiles = settings.profiles(Path::new(path));
        let _ = (profiles.words(), profiles.policy(), profiles.coarsest());
        for seen in [0, 1, u32::MAX] {
            let now = profiles.in_force(seen);
            assert!(Role::ALL.iter().all(|role| now.of(*role).name().parse() == Ok(now.of(*role))));
        }
        for rule in settings.retention() {
            assert!(rule.keep_last != Some(0) && rule.keep_every != Some(0));
            let _ = (rule.matches(Path::new(path), true), rule.matches(Path::new(path), false), rule.is_wild());
        }
    }
    for profile in Profile::ALL {
        if let Ok(changed) = Settings::with_default_profile(text, profile) {
            let settings = Settings::parse(&changed).expect("it was read before it was returned");
            assert_eq!(settings.id, Settings::parse(text).expect("it was read before").id);
        }
    }
}

/// A profile's name, as users write it.
pub(crate) fn profile_name(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(profile) = text.parse::<Profile>() {
        assert_eq!(profile.name(), text, "each has one name");
        let _ = (profile.safer(), profile.iterations_per_restore());
    }
    if let Ok(system) = text.parse::<SystemId>() {
        assert_eq!(system.to_string(), text, "each has one name");
        let changed = system.in_force(3, 9);
        assert_eq!(changed.to_string().parse(), Ok(changed));
    }
}

/// Checkpoints of some series under some rules.
pub(crate) fn retention(data: &[u8]) {
    let mut input = Input::new(data);
    let mut text =
        format!("format = 2\nstore = \"{}\"\ndefault_profile = \"balanced\"\ncache_mib = 1\n", "07".repeat(16));
    for _ in 0..1 + input.upto(2) {
        text.push_str(&format!("[[retention]]\nglob = \"{}\"\n", input.pick(&["**/*", "a/*", "checkpoint-*/", "v*"])));
        let what = input.byte();
        if what & 1 > 0 || what & 15 == 0 {
            text.push_str(&format!("keep_last = {}\n", 1 + input.upto(4)));
        }
        if what & 2 > 0 {
            text.push_str(&format!("keep_every = {}\n", 1 + input.upto(9)));
        }
        if what & 4 > 0 {
            text.push_str(&format!("keep_for = \"{}{}\"\n", input.byte(), input.pick(&["s", "m", "h", "d", "w"])));
        }
        if what & 8 > 0 {
            text.push_str(&format!("keep_checkpoint_max = {}\n", input.upto(4)));
        }
    }
    let settings = Settings::parse(&text).expect("such rules can be meant");
    let rules = settings.retention();
    let now = if input.flag() { i64::MAX } else { 1_700_000_000_000_000_000 };
    let unit = |input: &mut Input, at: usize| {
        let step = input.flag().then(|| u64::from(input.byte()));
        let marks = input.byte();
        let files = u64::from(input.byte() & 3);
        Unit {
            path: PathBuf::from(format!("u{at}")),
            rule: input.upto(rules.len() - 1),
            kind: if input.flag() { Kind::Directory } else { Kind::File },
            series: vec![input.byte() & 1],
            steps: step.into_iter().collect(),
            step,
            modified_ns: match input.byte() {
                0 => i64::MIN,
                1 => i64::MAX,
                minutes => now - i64::from(minutes) * 60_000_000_000,
            },
            files,
            with_tensors: u64::from(input.byte() & 1),
            bytes: 1,
            own: Own { files: files.min(u64::from(marks >> 5 & 1)), ..Own::default() },
            being_written: input.byte() > 240,
            lacks: input.byte() > 200,
            diverged: marks % 16 == 5,
            is_version: input.flag(),
            pinned: marks > 220,
            best: marks % 16 == 3,
        }
    };
    let mut units: Vec<Unit> = (0..input.upto(12)).map(|at| unit(&mut input, at)).collect();
    let verdicts = plan(&units, rules, now);
    assert_eq!(verdicts.len(), units.len());
    for (own, verdict) in units.iter().zip(&verdicts).filter(|(_, verdict)| verdict.removes()) {
        assert!(!own.pinned && !own.best && !own.being_written, "{verdict:?}");
        let same = |other: &Unit| (other.rule, other.kind, &other.series) == (own.rule, own.kind, &own.series);
        let stays = |(other, verdict): (&Unit, &stepfs::store::retention::Verdict)| same(other) && !verdict.removes();
        assert!(units.iter().zip(&verdicts).any(stays), "the last of a series never goes");
    }
    // A second plan for the remaining checkpoints removes nothing.
    let mut removed = verdicts.iter().map(|verdict| verdict.removes());
    units.retain(|_| removed.next() != Some(true));
    assert!(plan(&units, rules, now).iter().all(|verdict| !verdict.removes()));
}
