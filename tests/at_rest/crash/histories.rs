//! The fixed set of histories.

use std::time::Duration;

use super::live::{Live, Run};

fn step(number: usize) -> String {
    format!("run/step_{number:05}.safetensors")
}

fn plain(text: String) -> String {
    text
}

/// A training saves, some files fsynced and some only closed; each is archived when the next is there.
fn series() -> Run {
    let mut live = Live::new(plain);
    for at in 1..=5 {
        let bytes = live.next();
        match at % 2 {
            0 => live.write_durably(&step(at), &bytes),
            _ => live.write(&step(at), &bytes),
        }
        if at != 3 {
            live.settle();
        }
    }
    live.end("series")
}

/// A chain with a super-step; then names go, its first among them, and the rest is merged.
fn merge() -> Run {
    let mut live = Live::new(plain);
    for at in 1..=11 {
        let bytes = live.next();
        live.write(&step(at), &bytes);
    }
    live.settle();
    for at in [1, 4, 5, 9] {
        live.remove(&step(at));
        live.settle();
    }
    live.end("merge")
}

/// Checkpoints that are directories of two files.
fn groups() -> Run {
    let mut live = Live::new(plain);
    for at in 1..=3 {
        for file in ["model", "ema"] {
            let bytes = live.next();
            live.write(&format!("run/checkpoint-{at}/{file}.safetensors"), &bytes);
        }
        live.settle();
    }
    live.end("groups")
}

/// The policy removes all but the last two.
fn policy() -> Run {
    let mut live = Live::new(|text| format!("{text}\n[[retention]]\nglob = \"run/*\"\nkeep_last = 2\n"));
    for at in 1..=5 {
        let bytes = live.next();
        live.write(&step(at), &bytes);
        live.settle();
        if at > 2 {
            live.await_removal(&step(at - 2));
            live.settle();
        }
    }
    live.end("policy")
}

/// A released file is recalled: once to change it, once only to look at it.
fn recall() -> Run {
    let mut live = Live::new(plain);
    for at in 1..=4 {
        let bytes = live.next();
        live.write(&step(at), &bytes);
    }
    live.settle();
    live.rewrite(&step(2));
    live.settle();
    live.recall(&step(1));
    // The daemon ends, and the next one finds a file that nobody wrote to.
    live.close();
    live.open();
    live.end("recall")
}

/// One file overwritten in place, another replaced by rename, and a copy of a released one.
fn rewrite() -> Run {
    let mut live = Live::new(plain);
    for at in 1..=3 {
        let bytes = live.next();
        live.write("last.safetensors", &bytes);
        live.replace("latest.safetensors", &bytes);
        live.write(&step(at), &bytes);
        live.settle();
    }
    let released = live.bytes(&step(1));
    live.write("copies/again.safetensors", &released);
    live.settle();
    live.end("rewrite")
}

/// Restores are counted, a profile is made the default one, the daemon ends and starts.
fn settings() -> Run {
    let mut live = Live::new(plain);
    for at in 1..=3 {
        let bytes = live.next();
        live.write(&step(at), &bytes);
    }
    live.settle();
    live.restored(&step(1));
    live.settle();
    live.close();
    live.set_default_profile("exact");
    live.open();
    let bytes = live.next();
    live.write(&step(4), &bytes);
    live.settle();
    live.end("settings")
}

/// Small files and logs beside checkpoints, and one log that is large already.
pub(crate) fn logs() -> Run {
    let mut live = Live::new(plain);
    live.write("run/train.log", b"step 0\n");
    live.write("run/large.log", "step 0 loss 1.0\n".repeat(5000).as_bytes());
    for at in 1..=3 {
        for file in 0..8 {
            live.write(&format!("run/logs-{}/{at}-{file}.json", file % 3), format!("{{\"step\": {at}}}").as_bytes());
        }
        for line in 0..100 {
            let line = format!("step {at} line {line}\n").into_bytes();
            live.append("run/train.log", &line);
            live.append("run/large.log", &line);
            // About as long as two turns: some lines are made durable while the file is open again.
            std::thread::sleep(Duration::from_millis(5));
        }
        let bytes = live.next();
        live.write(&step(at), &bytes);
        if at == 2 {
            live.settle();
        }
    }
    live.end("logs")
}

/// Files come by import and leave by export, while nobody serves the store; others were removed meanwhile.
fn import() -> Run {
    let mut live = Live::new(plain);
    for at in 1..=3 {
        let bytes = live.next();
        live.import(&step(at), &bytes);
    }
    live.settle();
    live.export(&step(1), "exported");
    live.close();
    live.remove_at_rest(&step(1));
    live.open();
    live.end("import")
}

/// All of them, recorded.
pub(crate) fn all() -> Vec<Run> {
    let histories = [series, merge, groups, policy, recall, rewrite, settings, import, logs];
    std::thread::scope(|scope| {
        let runs: Vec<_> = histories.into_iter().map(|history| scope.spawn(history)).collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    })
}
