//! Files of the host, of its users and of other sandboxes.

use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use prorl_sandbox::{Bind, SandboxSpec};

use super::{Attack, Den, Proof, attack};
use crate::{
    contract::open_folder,
    support::{Live, is_root, sandbox_uid, skip},
};

/// Ways to a path of the host, each of them a Python expression.
fn ways(path: &Path) -> Vec<String> {
    let path = path.display();
    let up = "../".repeat(40);
    vec![
        format!("'{path}'"),
        format!("'{up}{path}'"),
        format!("'/proc/1/root{path}'"),
        format!("'/proc/1/cwd/{up}{path}'"),
        format!("'/proc/self/root{path}'"),
        format!("'/proc/%d/root{path}' % os.getppid()"),
        format!("'/proc/self/fd/%d/{up}{path}' % os.open('/', os.O_PATH)"),
        format!("'/dev/fd/%d/{up}{path}' % os.open('.', os.O_PATH)"),
        format!("'/proc/thread-self/root/proc/1/root{path}'"),
        format!(
            "(os.symlink('{path}', '/tmp/link'), '/tmp/link')[1] if not os.path.lexists('/tmp/link') else '/tmp/link'"
        ),
    ]
}

/// Secrets of the host: one in each place where a test may put one without harm, and the machine's own.
fn secrets() -> (Vec<tempfile::NamedTempFile>, Vec<PathBuf>) {
    let mut places = vec![std::env::temp_dir(), "/var/tmp".into()];
    if is_root() {
        places.extend(["/run", "/root", "/srv", "/opt", "/etc"].map(Into::into));
    } else if let Some(home) = std::env::home_dir() {
        places.push(home);
    }
    let secret = |place: &PathBuf| {
        let made = tempfile::Builder::new().prefix("prorl-secret-").tempfile_in(place).ok()?;
        fs::write(made.path(), "secret").unwrap();
        fs::set_permissions(made.path(), fs::Permissions::from_mode(0o666)).unwrap();
        Some(made)
    };
    let made: Vec<_> = places.iter().filter_map(secret).collect();
    assert!(made.len() >= 2);
    let mut paths: Vec<_> = made.iter().map(|secret| secret.path().to_owned()).collect();
    paths.push("/etc/shadow".into());
    (made, paths)
}

/// Why nothing comes of a file of the host's.
const CLOSED: &[&str] = &["ENOENT", "EACCES", "ENOTDIR"];

pub(super) async fn nothing_is_read_outside(den: &Den) {
    let (_made, paths) = secrets();
    let mut attacks: Vec<Attack> = Vec::new();
    for (n, path) in paths.iter().enumerate() {
        for (way, expression) in ways(path).into_iter().enumerate() {
            // Outside, the plain way proves that there is something to read.
            let proof = match way {
                0 if path.starts_with("/etc/shadow") => Proof::Root,
                0 => Proof::Anybody,
                _ => Proof::Nobody,
            };
            attacks.push(attack(&format!("read_{n}_{way}"), format!("read({expression})"), CLOSED, proof));
        }
    }
    for (runtime, spec) in &den.cells {
        let live = Live::start_on(&**runtime, spec).await;
        den.holds(&live, &attacks).await;
        let found =
            "print([name for name, _, files in os.walk('/') for name in files if name.startswith('prorl-secret-')])";
        assert_eq!(live.python(found).await, "[]");
        live.shut().await;
    }
    attacks.retain(|attack| attack.proof != Proof::Nobody);
    super::prove(&attacks);
}

pub(super) async fn nothing_is_written_outside(den: &Den) {
    let (made, paths) = secrets();
    // A folder that is shown on purpose, beside one that is not.
    let folder = open_folder();
    for name in ["shown", "beside"] {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::set_permissions(folder.path().join(name), fs::Permissions::from_mode(0o777)).unwrap();
    }
    let [shown, beside] = ["shown", "beside"].map(|name| folder.path().join(name));
    let write = |path: &str| format!("forked(lambda: open({path}, 'r+').write('x') and sys.exit(0))");
    let mut attacks = Vec::new();
    for (n, path) in paths.iter().enumerate() {
        for (way, expression) in ways(path).into_iter().enumerate() {
            attacks.push(attack(&format!("write_{n}_{way}"), write(&expression), CLOSED, Proof::Nobody));
        }
    }
    let (beside_path, shown_path) = (beside.display(), shown.display());
    // Each ends in a folder of the sandbox's own, if anywhere.
    for (name, code) in [
        ("plain", format!("os.mkdir('{beside_path}/made')")),
        ("upwards", "os.mkdir('/data/../beside/made')".to_owned()),
        ("handle", "os.mkdir('beside/made', dir_fd=os.open('/data/..', os.O_PATH))".to_owned()),
        ("link", format!("(os.symlink('{beside_path}', '/data/link'), os.mkdir('/data/link/made'))")),
        ("upward_link", "(os.symlink('../beside', '/data/up'), os.mkdir('/data/up/made'))".to_owned()),
        ("rename", "os.rename('/data/file', '/data/../beside/file')".to_owned()),
        ("hard_link", format!("os.link('/proc/self/root{beside_path}', '/data/hard')")),
        ("image", "open('/usr/bin/env', 'r+')".to_owned()),
    ] {
        attacks.push(attack(
            name,
            code,
            &["ENOENT", "EACCES", "EROFS", "EXDEV", "EPERM", "ETXTBSY", "ENOTDIR"],
            Proof::Nobody,
        ));
    }
    for (runtime, spec) in &den.cells {
        fs::write(shown.join("file"), "").unwrap();
        let bind = Bind { source: shown.clone(), target: "/data".into(), writable: true };
        let binds = spec.binds.iter().cloned().chain([bind]).collect();
        let live = Live::start_on(&**runtime, &SandboxSpec { binds, ..spec.clone() }).await;
        den.holds(&live, &attacks).await;
        live.shut().await;
        for secret in &made {
            assert_eq!(fs::read_to_string(secret.path()).unwrap(), "secret", "{}", secret.path().display());
        }
        assert_eq!(fs::read_dir(&beside).unwrap().count(), 0, "{}", den.name);
        assert!(shown.join("link").is_symlink(), "{shown_path}: the attack has come as far as its link");
        for name in ["link", "up", "file"] {
            fs::remove_file(shown.join(name)).unwrap();
        }
    }
}

/// The classic way out of a changed root: keep the old one open, and go up from there.
pub(super) async fn a_changed_root_leads_nowhere(den: &Den) {
    let secret = open_folder();
    let path = secret.path().display();
    let code = format!(
        "def climb():
    old = os.open('/', os.O_RDONLY)
    os.makedirs('/tmp/prorl-jail', exist_ok=True)
    try: os.chroot('/tmp/prorl-jail')
    except PermissionError: print('closed'); return
    os.fchdir(old)
    for _ in range(99): os.chdir('..')
    os.chroot('.')
    print('found' if os.path.exists('{path}') else 'lost', os.path.exists('/workspace'))
climb()
"
    );
    for (runtime, spec) in &den.cells {
        let live = Live::start_on(&**runtime, spec).await;
        let expected = if spec.fakeroot { "lost True" } else { "closed" };
        assert_eq!(live.python(&code).await, expected, "{}", den.name);
        live.shut().await;
    }
    if is_root() {
        assert!(super::outside(&code).starts_with("found"));
        let _ = fs::remove_dir("/tmp/prorl-jail");
    }
}

pub(super) async fn other_sandboxes_have_nothing_in_common(den: &Den) {
    let leave = "
for place in ('/workspace', '/tmp', '/dev/shm', '/var/tmp', os.environ['HOME']): open(place + '/prorl-canary', 'w').write('secret')
libc.shmget.restype = ctypes.c_int
print(libc.shmget(0x70726f, 4096, 0o1666) >= 0)
";
    let look = "
found = {os.path.join(folder, name) for folder, _, files in os.walk('/') if not folder.startswith(('/proc/sys', '/usr')) for name in files if name == 'prorl-canary'}
for pid in os.listdir('/proc'):
    for place in ('root/workspace', 'root/tmp', 'cwd', 'root/dev/shm'):
        try: found.update('%s/%s' % (pid, name) for name in os.listdir('/proc/%s/%s' % (pid, place)) if name == 'prorl-canary')
        except OSError: pass
print(len(found) > 0, libc.shmget(0x70726f, 4096, 0) >= 0)
";
    for (runtime, spec) in &den.cells {
        let one = Live::start_on(&**runtime, spec).await;
        let other = Live::start_on(&**runtime, spec).await;
        assert_eq!(one.python(leave).await, "True");
        assert_eq!(other.python(look).await, "False False", "{}", den.name);
        // It would have found them.
        assert_eq!(one.python(look).await, "True True");
        one.shut().await;
        other.shut().await;
    }
}

pub(super) async fn devices_and_the_kernels_own_files_are_closed(den: &Den) {
    let mut attacks = Vec::new();
    for (name, kind, major, minor) in
        [("memory", "CHR", 1, 1), ("disk", "BLK", 254, 0), ("log", "CHR", 1, 11), ("fuse", "CHR", 10, 229)]
    {
        let code = format!("node(stat.S_IF{kind}, {major}, {minor})");
        attacks.push(attack(&format!("make_{name}"), code, &["EPERM"], Proof::Root));
    }
    for name in [
        "kcore",
        "keys",
        "key-users",
        "interrupts",
        "timer_list",
        "vmallocinfo",
        "slabinfo",
        "kpageflags",
        "kpagecount",
    ] {
        attacks.push(attack(
            &format!("read_{name}"),
            format!("read('/proc/{name}') or 'nothing'"),
            &["nothing", "ENOENT"],
            Proof::Nobody,
        ));
    }
    for name in ["acpi", "scsi", "asound"] {
        attacks.push(attack(
            &format!("list_{name}"),
            format!("os.listdir('/proc/{name}')[:1] or 'nothing'"),
            &["nothing", "ENOENT"],
            Proof::Nobody,
        ));
    }
    attacks.push(attack("list_sys", "(os.listdir('/sys') or ['nothing'])[0]", &["nothing", "ENOENT"], Proof::Anybody));
    attacks.push(attack("debug", "os.listdir('/sys/kernel/debug') and None", &["ENOENT"], Proof::Root));
    attacks.push(attack("interrupts", "read('/proc/interrupts') or 'nothing'", &["nothing"], Proof::Anybody));
    den.withstands(&attacks).await;
}

pub(super) async fn set_user_id_programs_gain_nothing(den: &Den) {
    const ME: &str = "set_user_id_programs_gain_nothing";
    if !is_root() {
        return skip(ME, "only root can make a program that makes others root");
    }
    let folder = open_folder();
    let program = folder.path().join("ids");
    fs::copy("/usr/bin/id", &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    let own = sandbox_uid();
    // It does for the same user outside, unless the temporary folder is mounted so that none does.
    let outside = Command::new(&program).arg("-u").uid(own).gid(own).output().unwrap();
    if outside.stdout != b"0\n" {
        return skip(ME, "the temporary folder takes no such programs");
    }
    let bind = Bind { source: folder.path().to_owned(), target: "/data".into(), writable: false };
    for (runtime, spec) in den.cells.iter().filter(|(_, spec)| !spec.fakeroot) {
        let binds = spec.binds.iter().cloned().chain([bind.clone()]).collect();
        let live = Live::start_on(&**runtime, &SandboxSpec { binds, ..spec.clone() }).await;
        assert_eq!(live.sh("/data/ids -u").await, own.to_string());
        live.shut().await;
    }
}
