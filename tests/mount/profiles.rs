//! Profiles that are set through a mount, and restores that it notices.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use super::series::{Dtype, Random, Tensor, safetensors, train};
use super::support::{Mounted, attribute, errno, state, wait_until};
use stepfs::store::Store;

const PROFILE: &str = "user.stepfs.profile";

/// Nine restores are expected, and the first state is exact.
const EXPECTING: &str = "expected_restores = 9\n[[profile]]\nglob = \"step_1.*\"\nprofile = \"exact\"\n";

/// A mount of a store with these settings. `count` states of 8 MiB were saved and all but the newest released.
fn trained(passthrough: bool, settings: &str, count: u64) -> (Mounted, Vec<PathBuf>) {
    let dir = tempfile::tempdir().unwrap();
    drop(Store::open(&dir.path().join("store")).unwrap());
    let path = dir.path().join("store/stepfs.toml");
    fs::write(
        &path,
        fs::read_to_string(&path).unwrap().replacen("[[profile]]", &format!("{settings}\n[[profile]]"), 1),
    )
    .unwrap();
    let m = Mounted::on(dir, passthrough);
    let mut random = Random(3);
    let mut model = vec![Tensor::new("w.weight", Dtype::F32, &[1024, 2048], &mut random)];
    let paths: Vec<PathBuf> = (1..=count).map(|at| m.mnt().join(format!("step_{at}.safetensors"))).collect();
    for path in &paths {
        train(&mut model, 1e-3, &mut random);
        fs::write(path, safetensors(&model)).unwrap();
        wait_until("it is durable", || state(path) != "staged");
    }
    wait_until("the older ones are released", || paths[..paths.len() - 1].iter().all(|path| state(path) == "released"));
    (m, paths)
}

fn restores(m: &Mounted) -> u32 {
    m.archive.status().restored.iter().map(|lineage| lineage.restores).sum()
}

/// In both modes.
macro_rules! both {
    ($(fn $name:ident($passthrough:ident) $body:block)*) => {
        mod passthrough { $( #[test] fn $name() { super::$name(true); } )* }
        mod daemon { $( #[test] fn $name() { super::$name(false); } )* }
        $( fn $name($passthrough: bool) $body )*
    };
}

both! {
    fn reading_half_of_a_lossy_file_is_a_restore(passthrough) {
        let (m, paths) = trained(passthrough, EXPECTING, 5);
        let part = |path: &PathBuf, from: u64, len: usize| {
            let mut bytes = vec![0; len];
            File::open(path).unwrap().read_exact_at(&mut bytes, from).unwrap();
        };
        // These are no restores: a look at the first MiB, three times; a lossless file; the newest; a backup.
        (0..3).for_each(|_| part(&paths[1], 0, 1 << 20));
        fs::read(&paths[0]).unwrap();
        fs::read(&paths[4]).unwrap();
        let mut all = Vec::new();
        let aside = File::options().read(true).custom_flags(libc::O_NOATIME).open(&paths[2]);
        aside.unwrap().read_to_end(&mut all).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert_eq!(restores(&m), 0);
        // Five MiB of eight through one handle.
        part(&paths[1], 3 << 20, 5 << 20);
        wait_until("it is noticed", || restores(&m) == 1);
        // The backup decoded them: nothing is left to decode.
        fs::read(&paths[2]).unwrap();
        wait_until("it is noticed", || restores(&m) == 2);
        // Other ranks.
        (0..3).for_each(|_| drop(fs::read(&paths[2]).unwrap()));
        fs::read(&paths[1]).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert_eq!(restores(&m), 2);
        assert_eq!(m.archive.status().restored[0].profile, "balanced");
    }

    fn a_restore_just_before_the_end_is_remembered(passthrough) {
        let (m, paths) = trained(passthrough, "", 4);
        fs::read(&paths[1]).unwrap();
        let m = Mounted::on(m.unmount_keeping(), passthrough);
        assert_eq!(restores(&m), 1);
    }

    fn profiles_are_set_as_attributes(passthrough) {
        let m = Mounted::new(passthrough);
        let (dir, file) = (m.mnt().join("run"), m.mnt().join("run/step_1.bin"));
        fs::create_dir(&dir).unwrap();
        fs::write(&file, [7; 70_000]).unwrap();
        let shown = |path: &std::path::Path| attribute(path, PROFILE);
        assert_eq!((shown(&file).as_deref(), shown(&dir)), (Some("balanced"), None));
        xattr::set(&dir, PROFILE, b"exact").unwrap();
        assert_eq!((shown(&file).as_deref(), shown(&dir).as_deref(), shown(&m.mnt())), (Some("exact"), Some("exact"), None));
        xattr::set(&file, PROFILE, b"compact").unwrap();
        assert_eq!((shown(&file).as_deref(), shown(&dir).as_deref()), (Some("compact"), Some("exact")));
        for wrong in [&b"best"[..], b"", b"Exact", b"exact\n", b"\xff"] {
            assert_eq!(errno(xattr::set(&file, PROFILE, wrong)), libc::EINVAL);
        }
        assert_eq!(shown(&file).as_deref(), Some("compact"));
        assert_eq!(xattr::list(&file).unwrap().count(), 0);
        // It goes with the file, and stays after an unmount.
        let moved = m.mnt().join("step_1.bin");
        fs::rename(&file, &moved).unwrap();
        let m = Mounted::on(m.unmount_keeping(), passthrough);
        assert_eq!(attribute(&moved, PROFILE).as_deref(), Some("compact"));
        xattr::remove(&moved, PROFILE).unwrap();
        assert_eq!(attribute(&moved, PROFILE).as_deref(), Some("balanced"));
        assert_eq!(errno(xattr::remove(&moved, PROFILE)), libc::ENODATA);
        let link = m.mnt().join("link");
        std::os::unix::fs::symlink("step_1.bin", &link).unwrap();
        let (link, name) = (super::support::c(&link), super::support::c(std::path::Path::new(PROFILE)));
        // SAFETY: both strings end with NUL, the value has its length.
        let set = unsafe { libc::lsetxattr(link.as_ptr(), name.as_ptr(), c"exact".as_ptr().cast(), 5, 0) };
        assert_eq!(set, -1);
    }
}
