use super::*;
use std::ffi::OsStr;

#[track_caller]
fn is(path: &str, expected: &str) {
    assert_eq!(String::from_utf8(pattern(Path::new(path))).unwrap(), expected);
}

#[test]
fn the_step_varies_whatever_the_framework_calls_it() {
    is("step_00100.pt", "step_#.pt");
    is("run1/ckpt_5.pt", "run1/ckpt_#.pt");
    is("seed3/500.pt", "seed3/#.pt");
    is("epoch=0-step=8.ckpt", "epoch=#-step=#.ckpt");
    is(
        "lightning_logs/version_0/checkpoints/epoch=1-step=16.ckpt",
        "lightning_logs/version_0/checkpoints/epoch=#-step=#.ckpt",
    );
    is("out/checkpoint-20/model.safetensors", "out/checkpoint-#/model.safetensors");
    is("weights7.pt", "weights#.pt");
    is("iter_0000100/__0_1.distcp", "iter_#/__0_1.distcp");
    is("last.ckpt/__0_1.distcp", "last.ckpt/__0_1.distcp");
    is("10/default/d/abc", "#/default/d/abc");
    is("Run/CKPT_5.pt", "run/ckpt_#.pt");
}

#[test]
fn parameters_and_chunks_are_places() {
    is("global_step9_universal/zero/0.weight/fp32.pt", "global_step#_universal/zero/0.weight/fp32.pt");
    is("run/9/zero/step2.bias/exp_avg.pt", "run/#/zero/step2.bias/exp_avg.pt");
    is("zero/0.weight/exp_avg_sq.pt", "zero/0.weight/exp_avg_sq.pt");
    is("step9/zero/2.weight/momentum_buffer.pt", "step#/zero/2.weight/momentum_buffer.pt");
    is("checkpoint-10/other/fp32.pt", "checkpoint-#/other/fp32.pt");
    for chunk in ["0.1", "c.0.1", "c/0/1", "c/0"] {
        is(&format!("step_9.zarr/params/2/kernel/{chunk}"), &format!("step_#.zarr/params/2/kernel/{chunk}"));
        is(&format!("9/default/params.2.kernel/{chunk}"), &format!("#/default/params.2.kernel/{chunk}"));
        is(&format!("last/params/kernel/{chunk}"), &format!("last/params/kernel/{chunk}"));
    }
    is("c/9.pt", "c/#.pt");
}

#[test]
fn steps_are_the_numbers_that_vary() {
    assert_eq!(steps(Path::new("run7/epoch=3-step=0120.ckpt")), [3, 120]);
    assert_eq!(steps(Path::new("checkpoint-20/model-00001-of-00002.safetensors")), [20]);
    assert!(steps(Path::new("last.ckpt")).is_empty());
}

#[test]
fn ranks_shards_and_runs_do_not() {
    is(
        "global_step9/zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "global_step#/zero_pp_rank_0_mp_rank_01_optim_states.pt",
    );
    is("checkpoint-9/model-00001-of-00003.safetensors", "checkpoint-#/model-00001-of-00003.safetensors");
    is("version-100/variables-0-of-2.ckpt", "version-#/variables-0-of-2.ckpt");
    is("checkpoint-9/rng_state_1.pth", "checkpoint-#/rng_state_1.pth");
    is("ckpt_step5_rank3.pt", "ckpt_step#_rank3.pt");
    is("seed1/ckpt.pt", "seed1/ckpt.pt");
    is("run2/last.ckpt", "run2/last.ckpt");
    is("lightning_logs/version_3/checkpoints/last.ckpt", "lightning_logs/version_3/checkpoints/last.ckpt");
}

#[test]
fn one_of_several_numbers_is_the_step() {
    for (path, expected) in [
        ("epoch=3-step=120.ckpt", Some(120)),
        ("step=120-epoch=3.ckpt", Some(120)),
        ("epoch=3-val_loss=0.25.ckpt", Some(3)),
        ("run/checkpoint-500", Some(500)),
        ("run/global_step7", Some(7)),
        ("ckpt_step5_rank3.pt", Some(5)),
        ("version-12", Some(12)),
        ("10", Some(10)),
        ("weights7.pt", Some(7)),
        ("run2/last.ckpt", None),
        ("model-00001-of-00003.safetensors", None),
        ("step_99999999999999999999999.pt", Some(u64::MAX)),
        ("", None),
    ] {
        assert_eq!(of_file(Path::new(path)).step, expected, "{path}");
    }
}

#[test]
fn a_series_is_as_exact_as_the_names_are() {
    let name = |bytes: &'static [u8]| of_file(Path::new(OsStr::from_bytes(bytes))).series;
    assert_eq!(name(b"run\xff/Step_5.pt"), b"run\xff/Step_#.pt");
    assert_eq!(name(b"run\xff/Step_5.pt"), name(b"run\xff/Step_12.pt"));
    assert_ne!(name(b"run\xff/step_5.pt"), name(b"run\xfe/step_5.pt"));
    assert_ne!(name(b"Run/step_5.pt"), name(b"run/step_5.pt"));
    assert_eq!(name("é5/step_7".as_bytes()), "é5/step_#".as_bytes());
    assert_ne!(pattern(Path::new(OsStr::from_bytes(b"\xff_1"))), pattern(Path::new(OsStr::from_bytes(b"\xfe_1"))));
}

#[test]
fn a_directory_counts_by_its_own_name() {
    let all = |path: &str| {
        let counted = of_directory(Path::new(path));
        (String::from_utf8(counted.series).unwrap(), counted.step)
    };
    assert_eq!(all("ckpt_1/version-100"), ("ckpt_1/version-#".into(), Some(100)));
    assert_eq!(all("step_5/model"), ("step_#/model".into(), Some(5)));
    assert_eq!(all("exp1/run2"), ("exp1/run2".into(), None));
}

#[test]
fn only_words_for_training_count_it() {
    for path in ["checkpoint-5", "a/global_step10", "a/100", "iter_0000100", "epoch=1-step=2.ckpt"] {
        assert!(counts_training(Path::new(path)), "{path}");
    }
    for path in ["exp1", "run2", "step_5/model", "version_3", "seed7", "model-00001-of-00002.safetensors", ""] {
        assert!(!counts_training(Path::new(path)), "{path}");
    }
}

#[test]
fn shards_say_how_many_there_are() {
    let all = |name: &str| shard(name.as_bytes()).map(|s| (s.index, s.total, String::from_utf8(s.of).unwrap()));
    assert_eq!(all("variables-0-of-2.ckpt"), Some((0, 2, "variables-*-of-2.ckpt".into())));
    assert_eq!(all("model-00001-of-00003.safetensors"), Some((1, 3, "model-*-of-00003.safetensors".into())));
    assert_eq!(all("step_5-00002-of-00002.pt"), Some((2, 2, "step_5-*-of-00002.pt".into())));
    for none in ["variables.ckpt", "a-of-2", "0-of-", "0-of-x", "-of-", "1-of-99999999999999999999999", ""] {
        assert_eq!(all(none), None, "{none}");
    }
}

#[test]
fn other_runs_and_models_are_no_states_of_one() {
    for [one, other] in [
        ["sweep/model_lr0.1_step100.pt", "sweep/model_lr0.01_step100.pt"],
        ["sweep/lr=0.1-step=5.ckpt", "sweep/lr=0.2-step=5.ckpt"],
        ["model_0_epoch10.pt", "model_1_epoch10.pt"],
        ["exp1_step100.pt", "exp2_step100.pt"],
        ["model_step20_0.pt", "model_step20_1.pt"],
        ["llama-3-8b-step20.pt", "llama-3-70b-step20.pt"],
        ["qwen2.5-step20.pt", "qwen3.5-step20.pt"],
        ["lr1e-4_step1000.pt", "lr3e-4_step10.pt"],
        ["critic1_10.pt", "critic2_10.pt"],
        ["20240101_step5.pt", "20240102_step5.pt"],
        ["step20_r0.pt", "step20_r1.pt"],
        ["run/agent_0_step_10.pt", "run/agent_1_step_10.pt"],
    ] {
        assert_ne!(pattern(Path::new(one)), pattern(Path::new(other)), "{one}");
    }
    // Results change with the step. Without a word for training, any number may be the step.
    is("epoch=3-val_loss=0.25.ckpt", "epoch=#-val_loss=#.#.ckpt");
    is("epoch=3-val_mrr=0.43-step=9.ckpt", "epoch=#-val_mrr=#.#-step=#.ckpt");
    is("epoch3_0.5312.pt", "epoch#_#.#.pt");
    is("ep3_acc93.pt", "ep#_acc#.pt");
    is("05-0.25.h5", "#-#.#.h5");
    is("exp1-100.pt", "exp1-#.pt");
    is("gpt2-125m-100.pt", "gpt2-125m-#.pt");
    // Nobody knows which of them is the step: each stays for itself.
    is("10_0.pt", "10_0.pt");
    is("ckpt/000010/00.pt", "ckpt/000010/00.pt");
    is("step_10/0.pt", "step_#/0.pt");
    is("step_10/ensemble/0.pt", "step_#/ensemble/0.pt");
    is("checkpoint_10/1/model.pt", "checkpoint_#/1/model.pt");
    is("model_0004999.pth", "model_#.pth");
}

#[test]
fn a_directory_of_the_same_step_in_another_varies_with_it() {
    let path = "out/checkpoint-20/global_step20/mp_rank_00_model_states.pt";
    is(path, "out/checkpoint-#/global_step#/mp_rank_00_model_states.pt");
    assert_eq!(group(Path::new(path)), Some("out/checkpoint-20".into()));
    is("checkpoint-20/global_step30/x.pt", "checkpoint-20/global_step#/x.pt");
    is("epoch_3/step_120/x.pt", "epoch_3/step_#/x.pt");
}

#[test]
fn files_of_one_step_are_a_group() {
    let of = |path: &str, is_whole| Group::of(Path::new(path), is_whole).map(|group| (group.steps, group.name));
    assert_eq!(of("run/resnet50_step20.pt", false), Some((Some(vec![20]), None)));
    assert_eq!(of("run/model_step20_loss0.25.pt", false), of("run/optim_step20.pt", false));
    assert_eq!(of("run/ckpt_step5_rank3.pt", true), of("run/ckpt_step5_rank0.pt", true));
    assert_ne!(of("run/a_step5.pt", true), of("run/b_step5.pt", true));
    assert_ne!(of("run/lr0.1_step5.pt", true), of("run/lr0.2_step5.pt", true));
    assert_eq!(of("run/last.pt", true), None);
    assert_eq!(of("checkpoint-5/a.pt", true), of("checkpoint-5/b.pt", false));
}

#[test]
fn a_checkpoint_that_is_a_directory_is_a_group() {
    let group = |path: &str| group(Path::new(path)).map(|directory| directory.to_string_lossy().into_owned());
    assert_eq!(group("Out/Checkpoint-20/model.safetensors").as_deref(), Some("Out/Checkpoint-20"));
    assert_eq!(group("iter_0000100/sub/__0_1.distcp").as_deref(), Some("iter_0000100"));
    assert_eq!(group("checkpoint-9/model-00001-of-00003.safetensors").as_deref(), Some("checkpoint-9"));
    for single in ["step_100.pt", "run/epoch=0-step=8.ckpt", "checkpoint-5/step_7.pt", "run2/last.ckpt", "a/b/c"] {
        assert_eq!(group(single), None, "{single}");
    }
}

#[test]
fn parts_of_one_state_are_never_two_states() {
    for [one, other] in [
        ["step_100/model_tp0_pp1_ep2.pt", "step_100/model_tp0_pp1_ep3.pt"],
        ["out/last/optimizer_1.bin", "out/last/optimizer_2.bin"],
        ["client_0.pt", "client_1.pt"],
    ] {
        assert_ne!(pattern(Path::new(one)), pattern(Path::new(other)));
    }
    // Alone, `ep` counts epochs.
    assert_eq!(pattern(Path::new("model_ep2.pt")), pattern(Path::new("model_ep3.pt")));
}

#[test]
fn names_of_files_that_go_again() {
    for name in ["model.pt.tmp", "a/model.safetensors.INCOMPLETE", "a/.model.pt.Xy3", ".nfs0001", "model.pt~", "x.part"]
    {
        assert!(is_temporary(Path::new(name)), "{name}");
    }
    for name in ["model.pt", "tmp/model.pt", "tmp_step5.pt", "part.pt", "a.tmp/b.pt", "template.json"] {
        assert!(!is_temporary(Path::new(name)), "{name}");
    }
}

#[test]
fn results_are_read_from_names() {
    let results = |path: &str| -> Vec<(String, f64, Option<bool>)> {
        results(Path::new(path)).into_iter().map(|named| (named.word, named.value, named.lowest)).collect()
    };
    let loss = |value| vec![("loss".to_string(), value, Some(true))];
    assert_eq!(results("run/epoch=3-val_loss=0.0817.ckpt"), loss(0.0817));
    assert_eq!(results("run/epoch=3-val_loss=12.ckpt"), loss(12.0));
    assert_eq!(results("run/epoch=3-train_loss=-1.5.ckpt"), loss(-1.5));
    assert_eq!(results("epoch_3_acc_0.91.pt"), [("acc".to_string(), 0.91, Some(false))]);
    assert_eq!(results("weights.03-0.08.hdf5"), [(String::new(), 0.08, None)]);
    assert_eq!(results("epoch_7_val_0.5/model.pt"), [("val".to_string(), 0.5, None)]);
    for none in ["step_100.pt", "lr0.1_step5.pt", "model.pt", "checkpoint-500/model.safetensors"] {
        assert_eq!(results(none), [], "{none}");
    }
}

#[test]
fn only_words_for_training_prove_a_step() {
    for worded in
        ["step_5.pt", "epoch=3.ckpt", "checkpoint-10/model.pt", "ckpt_7.pt", "version-2/variables-0-of-2.ckpt"]
    {
        assert!(of_file(Path::new(worded)).is_worded, "{worded}");
    }
    for behind in ["rl_model_1000_steps.zip", "agent_0_steps.zip", "100steps.pt"] {
        assert!(of_file(Path::new(behind)).is_worded, "{behind}");
    }
    let series = |name: &str| String::from_utf8(of_file(Path::new(name)).series).unwrap();
    assert_eq!(series("rl_model_1000_steps.zip"), "rl_model_#_steps.zip");
    assert_eq!(series("lr0.1_step5.pt"), "lr0.1_step#.pt", "the word is the number's behind it");
    for open in
        ["100.pt", "model_3.pt", "trial_1.pt", "exp1-100.pt", "2/model.pt", "batch32.pt", "v1.pt", "subject1.pt"]
    {
        assert!(!of_file(Path::new(open)).is_worded, "{open}");
    }
    let iterations = |before: &str, after: &str| iterations(Path::new(before), Path::new(after));
    assert_eq!(iterations("step_100.pt", "step_500.pt"), Some(400.0));
    assert_eq!(iterations("epoch=1-step=100.ckpt", "epoch=2-step=200.ckpt"), Some(100.0));
    assert_eq!(iterations("checkpoint-500/model.safetensors", "checkpoint-1000/model.safetensors"), Some(500.0));
    assert_eq!(iterations("checkpoint_5.pt", "checkpoint_10.pt"), None);
    assert_eq!(iterations("epoch_1.pt", "epoch_2.pt"), None);
    assert_eq!(iterations("step_500.pt", "step_100.pt"), None);
}

mod run {
    use proptest::prelude::*;

    use super::super::*;

    const NAMES: [&str; 22] = [
        "run",
        "exp1",
        "exp2",
        "checkpoint-1",
        "checkpoint-2",
        "global_step1",
        "global_step02",
        "step_1.pt",
        "step_2.pt",
        "100",
        "200.pt",
        "x",
        "version-3",
        "version-4",
        "variables-0-of-2.ckpt",
        "epoch=1-step=2.ckpt",
        "epoch=1-step=4.ckpt",
        "zero",
        "fp32.pt",
        "c",
        "0.1",
        "model_rank0_step_1.pt",
    ];

    fn path() -> impl Strategy<Value = PathBuf> {
        prop::collection::vec(0..NAMES.len(), 1..5).prop_map(|names| names.into_iter().map(|at| NAMES[at]).collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        /// States of one file, files of one checkpoint and checkpoints of one series are of one run.
        #[test]
        fn what_waits_for_each_other_is_of_one_run(a in path(), b in path(), swap in 0..4usize, by in 0..NAMES.len()) {
            // Few random paths have anything in common, so the other one differs in one name only.
            let near: PathBuf =
                a.iter().enumerate().map(|(at, name)| if at == swap { NAMES[by].as_ref() } else { name }).collect();
            for b in [b, near] {
                let same = run(&a) == run(&b);
                prop_assert!(same || of_file(&a).series != of_file(&b).series || a == b, "{a:?} {b:?}");
                for is_whole in [false, true] {
                    let group = Group::of(&a, is_whole);
                    prop_assert!(same || group.is_none() || group != Group::of(&b, is_whole), "{a:?} {b:?}");
                }
                let series = |path| group(path).map(|of| of_directory(&of).series);
                prop_assert!(same || series(&a).is_none() || series(&a) != series(&b), "{a:?} {b:?}");
            }
        }
    }
}
