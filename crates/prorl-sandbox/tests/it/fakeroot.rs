//! What a fake root can do: install packages, over a range of ids where the machine gives one and over a single id elsewhere.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};

use prorl_core::hello::FakeRoot;
use prorl_sandbox::{
    Bind, Image, NamespaceConfig, NamespaceRuntime, Runtime, SandboxSpec, SandboxUser, SingularityConfig,
    SingularityRuntime,
};

use crate::contract::open_folder;
use crate::support::{
    LONG, Live, alone, assert_passed, image, in_namespace, is_alone, is_root, node, package_image, runtime, skip, spec,
};

/// The users that sandboxes can run as here. An ordinary user has one way to be a fake root, and root one for each user that
/// it can become.
fn users() -> Vec<Option<SandboxUser>> {
    let other = if is_root() { user_with_range() } else { None };
    [None].into_iter().chain(other.map(Some)).collect()
}

/// A user of this machine that may hand out ids.
pub(crate) fn user_with_range() -> Option<SandboxUser> {
    let table = fs::read_to_string("/etc/subuid").ok()?;
    let users = table.lines().filter_map(|line| nix::unistd::User::from_name(line.split(':').next()?).ok()?);
    let user = users.into_iter().find(|user| !user.uid.is_root())?;
    Some(SandboxUser { uid: user.uid.as_raw(), gid: user.gid.as_raw() })
}

fn namespace(sandbox_user: Option<SandboxUser>) -> Arc<dyn Runtime> {
    Arc::new(NamespaceRuntime::new(node(), NamespaceConfig { sandbox_user }))
}

/// Says so and returns nothing where there is no Apptainer.
fn singularity(test: &str, sandbox_user: Option<SandboxUser>) -> Option<Arc<dyn Runtime>> {
    match SingularityRuntime::new(node(), SingularityConfig { sandbox_user, ..SingularityConfig::default() }) {
        Ok(runtime) => Some(Arc::new(runtime)),
        Err(error) => {
            skip(test, &format!("{error:?}"));
            None
        }
    }
}

fn fakeroot(image: &Image) -> SandboxSpec {
    SandboxSpec { fakeroot: true, image: image.clone(), start_timeout: LONG, ..spec() }
}

/// Tells whether there is a range; where not, checks that the reason is one that a person can act on.
fn has_range(live: &Live) -> bool {
    match live.sandbox.facts().hello.fakeroot.as_ref().expect("a fake root was asked for") {
        FakeRoot::Range => true,
        FakeRoot::Single { missing } => {
            let named = ["newuidmap", "/etc/subuid"].iter().any(|name| missing.contains(name));
            assert!(named, "{missing}");
            false
        }
    }
}

/// A whole Debian, where one was made for the tests.
fn debian() -> Option<PathBuf> {
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/test-data/debian");
    let folder = std::env::var_os("PRORL_DEBIAN_DIR").map_or(made, PathBuf::from);
    folder.join("usr/bin/dpkg").exists().then_some(folder)
}

/// A folder with a package whose post-install script gives files away. Nothing where the tool for that is missing.
fn packages() -> Option<tempfile::TempDir> {
    const POST_INSTALL: &str = "#!/bin/sh
set -e
mkdir -p /var/lib/prorl-test
chown www-data:www-data /var/lib/prorl-test
chmod 2750 /var/lib/prorl-test
chown -R daemon /usr/share/prorl-test
chgrp 33 /usr/bin/prorl-test
chmod 4755 /usr/bin/prorl-test
";
    const CONTROL: &str = "Package: prorl-test
Version: 1.0
Architecture: all
Maintainer: nobody <nobody@localhost>
Description: gives files away
";
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let tree = folder.path().join("tree");
    for (name, text, mode) in [
        ("DEBIAN/control", CONTROL, 0o644),
        ("DEBIAN/postinst", POST_INSTALL, 0o755),
        ("etc/prorl-test.conf", "set = true\n", 0o644),
        ("usr/bin/prorl-test", "#!/bin/sh\necho installed\n", 0o755),
        ("usr/lib/prorl-test/part", "part\n", 0o644),
        ("usr/share/doc/prorl-test/copyright", "nobody's\n", 0o644),
        ("usr/share/prorl-test/data/file", "data\n", 0o644),
    ] {
        let path = tree.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut program = Command::new("dpkg-deb");
    program.args(["--build", "--root-owner-group"]).arg(&tree).arg(folder.path().join("test.deb"));
    let built = program.output().ok()?;
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    Some(folder)
}

/// Installs a Debian package whose post-install script changes owners.
async fn installs_a_package(runtime: &dyn Runtime, image: &Image) {
    let Some(packages) = packages() else { return skip("installs_a_package", "no dpkg-deb here") };
    let mut spec = fakeroot(image);
    spec.binds = vec![Bind { source: packages.path().to_owned(), target: "/packages".into(), writable: false }];
    let live = Live::start_on(runtime, &spec).await;
    let script = "
        mkdir -p /var/lib/dpkg/info /var/lib/dpkg/updates /var/lib/dpkg/triggers
        touch /var/lib/dpkg/status
        dpkg --install /packages/test.deb || echo failed
        prorl-test
        cat /usr/share/prorl-test/data/file /usr/lib/prorl-test/part /etc/prorl-test.conf";
    let said = live.sh(script).await;
    assert!(said.ends_with("\ninstalled\ndata\npart\nset = true"), "{said}");
    assert!(!said.contains("failed"), "{said}");
    let owners =
        live.sh("stat -c '%u:%g %a' /var/lib/prorl-test /usr/share/prorl-test/data/file /usr/bin/prorl-test").await;
    let expected = if has_range(&live) { "33:33 2750\n1:0 644\n0:33 4755" } else { "0:0 2750\n0:0 644\n0:0 4755" };
    assert_eq!(owners, expected, "{said}");
    assert!(live.sh("dpkg --status prorl-test").await.contains("install ok installed"));
    live.shut().await;
}

/// Adds a user, and installs a package by way of `apt`, which becomes another user where it can.
async fn does_what_scripts_of_packages_do(runtime: &dyn Runtime, image: &Image) {
    let Some(packages) = packages() else { return skip("does_what_scripts_of_packages_do", "no dpkg-deb here") };
    let mut spec = fakeroot(image);
    spec.binds = vec![Bind { source: packages.path().to_owned(), target: "/packages".into(), writable: false }];
    let live = Live::start_on(runtime, &spec).await;
    assert_eq!(live.sh("useradd --system --shell /bin/sh joe && id -un joe").await, "joe");
    let said = live.sh("apt-get --yes --quiet=2 install /packages/test.deb && prorl-test").await;
    assert!(said.ends_with("\ninstalled"), "{said}");
    live.shut().await;
}

/// Installs a wheel with pip.
async fn installs_a_wheel(runtime: &dyn Runtime, image: &Image) {
    let live = Live::start_on(runtime, &fakeroot(image)).await;
    if live.sh("python3 -m pip --version >/dev/null 2>&1 && echo found").await != "found" {
        live.shut().await;
        return skip("installs_a_wheel", "no pip here");
    }
    let script = r"
        set -e
        mkdir -p wheel/prorl_test-1.0.dist-info
        cd wheel
        echo 'print(6 * 7)' > prorl_test.py
        printf 'Metadata-Version: 2.1\nName: prorl-test\nVersion: 1.0\n' > prorl_test-1.0.dist-info/METADATA
        printf 'Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n' \
            > prorl_test-1.0.dist-info/WHEEL
        for name in prorl_test.py prorl_test-1.0.dist-info/METADATA prorl_test-1.0.dist-info/WHEEL \
            prorl_test-1.0.dist-info/RECORD; do echo $name,,; done > prorl_test-1.0.dist-info/RECORD
        python3 -m zipfile -c ../prorl_test-1.0-py3-none-any.whl prorl_test.py prorl_test-1.0.dist-info
        cd /
        PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-index --root-user-action=ignore \
            /workspace/prorl_test-1.0-py3-none-any.whl
        python3 -m prorl_test";
    let said = live.sh(script).await;
    assert!(said.contains("Successfully installed prorl-test-1.0") && said.ends_with("\n42"), "{said}");
    // Into the system's own folder, as root does.
    assert!(!said.contains("Defaulting to user installation"), "{said}");
    live.shut().await;
}

#[tokio::test]
async fn packages_install_over_the_hosts_programs() {
    for user in users() {
        installs_a_package(&*namespace(user), &Image::Host).await;
        installs_a_wheel(&*namespace(user), &Image::Host).await;
    }
}

#[tokio::test]
async fn packages_install_over_an_image() {
    const ME: &str = "packages_install_over_an_image";
    let Some(folder) = package_image() else { return skip(ME, "no dpkg here to make an image of") };
    let image = Image::Directory(folder.path().to_owned());
    for user in users() {
        for runtime in [Some(namespace(user)), singularity(ME, user)].into_iter().flatten() {
            installs_a_package(&*runtime, &image).await;
        }
    }
}

/// Whose files are root's, as in most images that people pass around.
#[tokio::test]
async fn packages_install_over_a_packed_image() {
    const ME: &str = "packages_install_over_a_packed_image";
    let Some(folder) = package_image() else { return skip(ME, "no dpkg here to make an image of") };
    for name in ["dev", "proc", "sys", "tmp"] {
        fs::create_dir_all(folder.path().join(name)).unwrap();
    }
    let target = tempfile::tempdir().unwrap();
    fs::set_permissions(target.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let file = target.path().join("image.sqfs");
    let mut pack = Command::new("mksquashfs");
    pack.arg(folder.path()).arg(&file).args(["-all-root", "-quiet", "-no-progress"]).stdout(Stdio::null());
    match pack.status() {
        Err(_) => return skip(ME, "no mksquashfs here"),
        Ok(status) => assert!(status.success()),
    }
    for user in users() {
        let Some(runtime) = singularity(ME, user) else { return };
        installs_a_package(&*runtime, &Image::File(file.clone())).await;
    }
}

#[tokio::test]
async fn packages_install_over_a_debian() {
    const ME: &str = "packages_install_over_a_debian";
    let Some(image) = debian() else {
        return skip(ME, "no such image was made, and PRORL_DEBIAN_DIR names none");
    };
    // The checkout may be closed to the user that sandboxes of root belong to.
    let open = open_folder();
    let image = if is_root() {
        let copied = Command::new("cp").arg("-a").arg(&image).arg(open.path().join("debian")).status().unwrap();
        assert!(copied.success());
        open.path().join("debian")
    } else {
        image
    };
    let image = Image::Directory(image);
    for user in users() {
        for runtime in [Some(namespace(user)), singularity(ME, user)].into_iter().flatten() {
            installs_a_package(&*runtime, &image).await;
            does_what_scripts_of_packages_do(&*runtime, &image).await;
            installs_a_wheel(&*runtime, &image).await;
        }
    }
}

/// Helpers of the scripts below: each prints the error number of a call, 0 when it succeeded.
const TELL: &str = "
import os, stat, sys
def tell(name, call, *arguments):
    try:
        call(*arguments)
        print(name, 0)
    except OSError as error:
        print(name, error.errno)
";

#[tokio::test]
async fn ids_that_do_not_exist_are_pretended() {
    let live = Live::start_on(&runtime(), &fakeroot(&Image::Host)).await;
    if has_range(&live) || live.sandbox.facts().hello.python.is_none() {
        live.shut().await;
        return skip("ids_that_do_not_exist_are_pretended", "this user has a range of ids, or there is no python3");
    }
    let script = format!(
        "{TELL}
open(\"file\", \"w\").close()
tell(\"chown\", os.chown, \"file\", 33, 33)
tell(\"lchown\", os.lchown, \"file\", 33, 33)
tell(\"fchown\", os.fchown, os.open(\"file\", os.O_RDONLY), 33, 33)
tell(\"fchownat\", lambda: os.chown(\"file\", 33, 33, dir_fd=os.open(\".\", os.O_RDONLY)))
for name in (\"setgroups\", \"setgid\", \"setegid\", \"setuid\", \"seteuid\"):
    tell(name, getattr(os, name), [33] if name == \"setgroups\" else 33)
for name in (\"setregid\", \"setreuid\"): tell(name, getattr(os, name), 33, 33)
for name in (\"setresgid\", \"setresuid\"): tell(name, getattr(os, name), 33, 33, 33)
tell(\"fifo\", os.mkfifo, \"fifo\")
for name in (\"chr\", \"blk\"): tell(name, os.mknod, name, getattr(stat, f\"S_IF{{name.upper()}}\") | 0o600, os.makedev(1, 3))
print(os.stat(\"file\").st_uid, os.getuid(), os.getresgid(), sorted(os.listdir()))"
    );
    let said = live.sh(&format!("python3 -c '{script}'")).await;
    let lines: Vec<_> = said.lines().collect();
    let (calls, rest) = lines.split_at(lines.len() - 3);
    assert_eq!(calls.len(), 14, "{said}");
    assert!(calls.iter().all(|line| line.ends_with(" 0")), "{said}");
    // A device that is not there would be missed at the next step.
    assert_eq!(rest, ["chr 1", "blk 1", "0 0 (0, 0, 0) ['fifo', 'file']"]);
    assert!(live.sh("LC_ALL=C mknod -m 600 null c 1 3").await.contains("Operation not permitted"));
    live.shut().await;
}

#[tokio::test]
async fn ids_of_a_range_are_real() {
    for runtime in users().into_iter().map(namespace) {
        let live = Live::start_on(&*runtime, &fakeroot(&Image::Host)).await;
        if !has_range(&live) || live.sandbox.facts().hello.python.is_none() {
            live.shut().await;
            skip("ids_of_a_range_are_real", "this user has no range of ids, or there is no python3");
            continue;
        }
        let script = format!(
            "{TELL}
open(\"file\", \"w\").close()
os.chmod(\"file\", 0o600)
tell(\"last\", os.chown, \"file\", 65534, 65534)
tell(\"mapped\", os.chown, \"file\", 33, 34)
tell(\"beyond\", os.chown, \"file\", 70000, 70000)
tell(\"device\", os.mknod, \"device\", stat.S_IFCHR | 0o600, os.makedev(1, 3))
status = os.stat(\"file\")
print(status.st_uid, status.st_gid)
os.setgroups([5]); os.setgid(34); os.setuid(34)
print(os.getresuid(), os.getresgid(), os.getgroups())
tell(\"other\", open, \"file\")
tell(\"back\", os.setuid, 0)
import subprocess
subprocess.Popen([\"sleep\", \"1000\"], stdin=-3, stdout=-3, stderr=-3, start_new_session=True)"
        );
        let said = live.sh(&format!("python3 -c '{script}'")).await;
        assert_eq!(
            said.lines().collect::<Vec<_>>(),
            [
                "last 0",
                "mapped 0",
                "beyond 22",
                "device 1",
                "33 34",
                "(34, 34, 34) (34, 34, 34) [5]",
                "other 13",
                "back 1"
            ]
        );
        // What another user of the sandbox has started ends with it.
        let namespace = live.sandbox.facts().hello.pid_namespace;
        assert_eq!(live.sh("stat -c %u $(dirname $(grep -l sleep /proc/[0-9]*/comm))").await, "34");
        live.shut().await;
        assert_eq!(in_namespace(namespace), Vec::<u32>::new());
    }
}

#[tokio::test]
async fn without_a_fake_root_nothing_is_pretended() {
    let live = Live::start_on(&runtime(), &spec()).await;
    assert_eq!(live.sandbox.facts().hello.fakeroot, None);
    assert_eq!(live.sh("touch x; (chown 33 x || chgrp 33 x || mknod y c 1 3) 2>/dev/null || echo no").await, "no");
    assert_eq!(live.sh("grep -c www-data /etc/passwd; touch /usr/bin/x 2>/dev/null || echo no").await, "0\nno");
    live.shut().await;
}

#[tokio::test]
async fn a_fake_root_puts_new_files_beside_those_of_others() {
    let live = Live::start_on(&runtime(), &fakeroot(&Image::Host)).await;
    assert_eq!(live.sh("touch /usr/bin/x /usr/share/man/x && mkdir /usr/lib/x && echo ok").await, "ok");
    assert_eq!(live.sh("test -x /usr/bin/env && (echo x >> /usr/bin/env) 2>/dev/null || echo no").await, "no");
    assert_eq!(live.sh("stat -c %a /usr/bin /usr/share").await, "755\n755");
    live.shut().await;
    // A folder that the user may not read stays closed.
    let image = image();
    let closed = image.path().join("usr/closed");
    fs::create_dir(&closed).unwrap();
    fs::write(closed.join("file"), "secret").unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    let live = Live::start_on(&runtime(), &fakeroot(&Image::Directory(image.path().to_owned()))).await;
    let readable = live.sh("cat /usr/closed/file 2>/dev/null || echo no").await;
    assert_eq!(readable, if is_root() { "no" } else { "secret" });
    live.shut().await;
}

/// As where a service manager has taken them away, so that no set-uid program can help.
#[tokio::test]
async fn a_host_without_new_privileges_gets_a_single_id_and_the_reason() {
    const ME: &str = "fakeroot::a_host_without_new_privileges_gets_a_single_id_and_the_reason";
    if Command::new("setpriv").arg("--version").stdout(Stdio::null()).status().is_err() {
        return skip(ME, "no setpriv here");
    }
    if !is_alone(ME) {
        return assert_passed(&alone(ME, &["setpriv", "--no-new-privs"]).output().unwrap());
    }
    for runtime in users().into_iter().map(namespace) {
        let live = Live::start_on(&*runtime, &fakeroot(&Image::Host)).await;
        assert!(!has_range(&live));
        assert_eq!(live.sh("touch x && chown 33 x && id -u").await, "0");
        live.shut().await;
    }
}

/// The two programs write a map for nobody whose group is not its first.
#[tokio::test]
async fn a_failure_of_newuidmap_leaves_a_single_id_and_its_words() {
    const ME: &str = "a_failure_of_newuidmap_leaves_a_single_id_and_its_words";
    let (true, Some(user)) = (is_root(), user_with_range()) else {
        return skip(ME, "only root can become a user with another group, and that user needs a line in /etc/subuid");
    };
    let runtime = namespace(Some(SandboxUser { gid: user.gid + 1, ..user }));
    let live = Live::start_on(&*runtime, &fakeroot(&Image::Host)).await;
    let Some(FakeRoot::Single { missing }) = &live.sandbox.facts().hello.fakeroot else { panic!("a range") };
    assert!(missing.starts_with("newuidmap failed (exit status: 1): "), "{missing}");
    assert_eq!(live.sh("touch x && chown 33:33 x && stat -c %u:%g x").await, "0:0");
    live.shut().await;
}
