use super::*;
use crate::fs::numbers::ROOT;

struct Fixture {
    dir: tempfile::TempDir,
    archive: std::sync::Arc<Archive>,
    table: Table,
}

fn fixture() -> Fixture {
    fixture_of(false)
}

fn fixture_of(shared: bool) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let archive = Archive::open(crate::store::Store::open(dir.path()).unwrap()).unwrap();
    let table = Table::new(&archive.store().tree(), shared).unwrap();
    Fixture { dir, archive, table }
}

impl Fixture {
    fn enter(&mut self, parent: u64, name: &str) -> u64 {
        let name = OsStr::new(name);
        let found = self.table.look(parent, name).unwrap();
        let ino = self.table.admit(&self.archive, parent, name, &found).unwrap();
        self.table.count(ino);
        ino
    }

    fn tree(&self) -> PathBuf {
        self.dir.path().join("tree")
    }
}

#[test]
fn only_names_are_names() {
    let f = fixture();
    for bad in ["", ".", "..", "a/b", "/", "a\0b"] {
        assert!(matches!(f.table.child(ROOT, OsStr::new(bad)), Err(Fault::Code(libc::EINVAL))), "{bad:?}");
    }
    let long = "x".repeat(256);
    assert!(matches!(f.table.child(ROOT, OsStr::new(&long)), Err(Fault::Code(libc::ENAMETOOLONG))));
    assert_eq!(f.table.child(ROOT, OsStr::new(&long[1..])).unwrap(), Path::new(&long[1..]));
}

#[test]
fn hard_links_share_a_node_and_paths_follow_renamed_directories() {
    let mut f = fixture();
    std::fs::create_dir(f.tree().join("d")).unwrap();
    std::fs::write(f.tree().join("d/a"), "x").unwrap();
    std::fs::hard_link(f.tree().join("d/a"), f.tree().join("b")).unwrap();
    let d = f.enter(ROOT, "d");
    let a = f.enter(d, "a");
    assert_eq!(f.enter(ROOT, "b"), a);
    assert_eq!(f.table.path(a).unwrap(), Path::new("d/a"));
    f.table.unbind(ROOT, OsStr::new("d"));
    f.table.bind(ROOT, OsStr::new("e"), d);
    assert_eq!(f.table.path(a).unwrap(), Path::new("e/a"));
    f.table.unbind(d, OsStr::new("a"));
    assert_eq!(f.table.path(a).unwrap(), Path::new("b"));
    assert_eq!(f.table.path(ROOT).unwrap(), Path::new(""));
}

#[test]
fn what_the_kernel_forgets_is_dropped_with_its_parents() {
    let mut f = fixture();
    std::fs::create_dir(f.tree().join("d")).unwrap();
    std::fs::write(f.tree().join("d/a"), "x").unwrap();
    let d = f.enter(ROOT, "d");
    let a = f.enter(d, "a");
    f.enter(d, "a");
    f.table.forget(d, 1);
    assert!(f.table.node(d).is_ok(), "its child is still known");
    f.table.forget(a, 1);
    assert!(f.table.node(a).is_ok(), "looked up twice");
    f.table.forget(a, 1);
    assert!(f.table.node(a).is_err());
    assert!(f.table.node(d).is_err());
    f.table.forget(ROOT, u64::MAX);
    assert!(f.table.node(ROOT).is_ok());
    assert!(f.table.node(ROOT).unwrap().children.is_empty());
}

#[test]
fn a_removed_file_can_be_reached_until_it_is_forgotten() {
    let mut f = fixture();
    let name = OsStr::new("a");
    std::fs::write(f.tree().join("a"), "xyz").unwrap();
    let a = f.enter(ROOT, "a");
    let metadata = f.tree().join("a").metadata().unwrap();
    let removal = f.table.before_removal(Path::new("a"), &metadata);
    std::fs::remove_file(f.tree().join("a")).unwrap();
    f.table.removed(ROOT, name, removal);
    assert_eq!(f.table.path(a), None);
    assert_eq!(f.table.place(a).unwrap().metadata().unwrap().len(), 3);
    f.table.forget(a, 1);
    assert!(matches!(f.table.place(a), Err(Fault::Code(libc::ESTALE))));
}

/// Other daemons rename and remove it. A later directory may get its former name and its number.
#[test]
fn a_former_name_of_a_directory_leads_nowhere() {
    let mut f = fixture_of(true);
    std::fs::create_dir_all(f.tree().join("p/d")).unwrap();
    let p = f.enter(ROOT, "p");
    let d = f.enter(p, "d");
    std::fs::rename(f.tree().join("p/d"), f.tree().join("p/e")).unwrap();
    assert_eq!(f.enter(p, "e"), d);
    f.table.forget(d, 2);
    assert!(f.table.node(p).unwrap().children.is_empty());
    std::fs::rename(f.tree().join("p/e"), f.tree().join("p/d")).unwrap();
    let again = f.enter(p, "d");
    assert!(f.table.node(again).is_ok());
    f.table.forget(again, 1);
    f.table.forget(p, 1);
    assert!(f.table.node(p).is_err(), "nothing keeps it");
}

/// Another daemon changes names between two calls.
#[test]
fn a_name_that_leads_elsewhere_meanwhile_is_not_followed() {
    use std::os::unix::fs::PermissionsExt;
    let mut f = fixture_of(true);
    let (outside, tree) = (f.dir.path().join("outside"), f.tree());
    std::fs::write(&outside, "x").unwrap();
    std::fs::set_permissions(&outside, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::write(tree.join("a"), "x").unwrap();
    let a = f.enter(ROOT, "a");
    let place = f.table.place(a).unwrap();
    std::fs::rename(tree.join("a"), tree.join("b")).unwrap();
    std::os::unix::fs::symlink(&outside, tree.join("a")).unwrap();
    std::fs::set_permissions(&place.path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&outside), mode(&tree.join("b"))), (0o600, 0o644));
    assert!(matches!(f.table.place(a), Err(Fault::Code(libc::ESTALE))));
}

/// Else the file would be read, and brought back, with the bytes of another one.
#[test]
fn a_stub_that_took_the_name_is_not_taken_for_the_file() {
    let mut f = fixture_of(true);
    let (tree, name) = (f.tree(), OsStr::new("a"));
    std::fs::write(tree.join("a"), [1; 100_000]).unwrap();
    let found = f.table.look(ROOT, name).unwrap();
    let stub = crate::store::Stub {
        store: f.archive.store().id(),
        object: crate::store::Id::random().unwrap(),
        logical_len: 100_000,
    };
    std::fs::rename(tree.join("a"), tree.join("b")).unwrap();
    std::fs::write(tree.join("a"), stub.encode()).unwrap();
    File::options().write(true).open(tree.join("a")).unwrap().set_len(100_000).unwrap();
    assert!(matches!(f.table.admit(&f.archive, ROOT, name, &found), Err(Fault::Code(libc::ESTALE))));
    let a = f.enter(ROOT, "a");
    assert_eq!(f.table.node(a).unwrap().stub, Some(stub));
    let b = f.enter(ROOT, "b");
    assert_eq!(f.table.node(b).unwrap().stub, None);
}
