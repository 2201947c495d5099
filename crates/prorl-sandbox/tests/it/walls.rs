//! What code in a sandbox can see, reach and change.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::resource::{Resource, getrlimit},
};
use prorl_sandbox::{Bind, Image, Network, SandboxSpec};

use crate::support::{Live, alone, assert_passed, image, is_alone, is_root, skip, spec};

fn fakeroot() -> SandboxSpec {
    SandboxSpec { fakeroot: true, ..spec() }
}

fn of_image(image: &Path) -> SandboxSpec {
    SandboxSpec { image: Image::Directory(image.to_owned()), ..spec() }
}

#[tokio::test]
async fn the_environment_is_clean_and_as_ordered() {
    let mut spec = spec();
    spec.env = vec![("ANSWER".to_owned(), "4 2\n'\"$x".to_owned()), ("LANG".to_owned(), "C".to_owned())];
    let live = Live::start(&spec).await;
    // This process has some that must not be there, such as cargo's.
    let seen = live.sh("env -0 | tr '\\0\\n' '\\n_' | sort").await;
    let expected = [
        "ANSWER=4 2_'\"$x",
        "HOME=/home/agent",
        "LANG=C",
        "LOGNAME=agent",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PWD=/workspace",
        "SHELL=/bin/bash",
        "TERM=dumb",
        "USER=agent",
    ];
    assert_eq!(seen.lines().collect::<Vec<_>>(), expected);
    live.shut().await;
}

#[tokio::test]
async fn the_working_folder_and_the_home_are_writable() {
    for (spec, home) in [(spec(), "/home/agent"), (fakeroot(), "/root")] {
        let live = Live::start(&spec).await;
        assert_eq!(
            live.sh("pwd; touch here ~/there /tmp/x /dev/shm/x /usr/own && echo ~").await,
            format!("/workspace\n{home}")
        );
        live.shut().await;
    }
}

/// Lines of this user's `/proc/self/status` inside, by name.
async fn status(live: &Live, names: &[&str]) -> Vec<String> {
    let status = live.sh("cat /proc/self/status").await;
    let value = |name: &&str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
    names.iter().map(|name| value(name).unwrap_or_else(|| panic!("{name} in {status}")).to_owned()).collect()
}

/// User ids of a process as the host sees them: real, effective, saved, of the file system.
fn uids_outside(pid: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    uids.split_whitespace().map(|uid| uid.parse().unwrap()).collect()
}

#[tokio::test]
async fn the_user_is_ones_own_or_a_fake_root_and_never_root_outside() {
    let own = if is_root() { 65534 } else { nix::unistd::geteuid().as_raw() };
    for (spec, uid, name) in [(spec(), own, "agent"), (fakeroot(), 0, "root")] {
        let live = Live::start(&spec).await;
        assert_eq!(live.sh("id -u; id -un").await, format!("{uid}\n{name}"));
        // Nobody but root can leave its other groups, and those have no number of their own inside.
        let groups = live.sh("id -G").await;
        let own = live.sh("id -g").await;
        assert!(groups.split(' ').all(|group| group == own || group == "65534"), "{groups}");
        let hello = &live.sandbox.facts().hello;
        for pid in [hello.host_pid, live.sandbox.facts().outer_pid] {
            let uids = uids_outside(pid);
            assert!(uids.iter().all(|uid| *uid == uids[0] && *uid != 0), "{uids:?}");
        }
        live.shut().await;
    }
}

#[tokio::test]
async fn there_are_no_capabilities_but_a_fake_roots_own() {
    let names = ["CapEff", "CapBnd", "NoNewPrivs"];
    let live = Live::start(&spec()).await;
    assert_eq!(status(&live, &names).await, ["0000000000000000", "0000000000000000", "1"]);
    live.shut().await;
    let live = Live::start(&fakeroot()).await;
    assert_eq!(status(&live, &names).await, ["00000000800404fb", "00000000800404fb", "1"]);
    assert_eq!(live.sh("touch x; chown 0:0 x; mount -t tmpfs x /tmp >/dev/null 2>&1 || echo no").await, "no");
    live.shut().await;
}

#[tokio::test]
async fn the_hosts_files_are_not_there() {
    // Places where a test may put a secret without harm; each is removed with its value.
    let name = format!("prorl-secret-{}", std::process::id());
    let mut places = vec![std::env::temp_dir(), "/var/tmp".into()];
    if is_root() {
        places.extend(["/run", "/root", "/var/lib", "/srv", "/opt", "/etc"].map(Into::into));
    } else if let Some(home) = std::env::home_dir() {
        places.push(home);
    }
    let secrets: Vec<_> = places
        .iter()
        .filter_map(|place| {
            tempfile::Builder::new()
                .prefix(&name)
                .permissions(fs::Permissions::from_mode(0o644))
                .tempfile_in(place)
                .ok()
        })
        .collect();
    assert!(secrets.len() >= 2);
    for spec in [spec(), fakeroot()] {
        let live = Live::start(&spec).await;
        for secret in &secrets {
            let path = secret.path().display();
            assert_eq!(live.sh(&format!("test -e {path} || echo none")).await, "none", "{path}");
        }
        let everything = live.sh("du -ax / 2>/dev/null; echo searched").await;
        assert!(everything.contains("/home") && everything.ends_with("searched"), "{everything}");
        assert!(!everything.contains(&name), "{everything}");
        assert_eq!(live.sh("ls /etc/shadow /etc/gshadow /etc/sudoers /etc/ssh /sys /srv 2>/dev/null").await, "");
        assert_eq!(
            live.sh("ls -A /run /var/tmp /home; ls /var").await.replace(['\n', ' '], ""),
            "/home:agent/run:/var/tmp:tmp"
        );
        live.shut().await;
    }
}

#[tokio::test]
async fn the_hosts_mounts_are_gone() {
    let live = Live::start(&spec()).await;
    let mounts = live.sh("cut -d' ' -f5 /proc/self/mountinfo").await;
    assert_eq!(mounts.lines().filter(|target| *target == "/").count(), 1, "{mounts}");
    assert_eq!(live.sh("ls -d /host /layer /image /../host 2>/dev/null").await, "");
    live.shut().await;
}

/// Another library of the host's program may have opened a file to be inherited.
#[tokio::test]
async fn the_hosts_open_files_are_not_passed_on() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fcntl(file.as_file(), FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    let live = Live::start(&spec()).await;
    assert_eq!(live.sh("ls /proc/$$/fd").await.lines().collect::<Vec<_>>(), ["0", "1", "2"]);
    if is_root() {
        // Nobody else may look at the guest's own.
        for pid in [live.sandbox.facts().hello.host_pid, live.sandbox.facts().outer_pid] {
            let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
            let mut names = open.map(|entry| fs::read_link(entry.unwrap().path()).unwrap_or_default());
            assert!(names.all(|name| name != file.path()), "open in {pid}");
        }
    }
    live.shut().await;
}

#[tokio::test]
async fn no_process_outside_can_be_seen() {
    let live = Live::start(&spec()).await;
    let names = live.sh("ls /proc").await;
    let pids: Vec<u32> = names.lines().filter_map(|name| name.parse().ok()).collect();
    assert!(pids.contains(&1) && pids.len() < 10, "{pids:?}");
    live.shut().await;
}

#[tokio::test]
async fn there_is_no_controlling_terminal() {
    let live = Live::start(&spec()).await;
    assert_eq!(live.sh("(exec 3<> /dev/tty) 2>/dev/null && echo tty").await, "");
    for pid in ["1", "self"] {
        let stat = live.sh(&format!("cat /proc/{pid}/stat")).await;
        // The name in brackets is followed by state, parent, group, session and terminal.
        assert_eq!(stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(4)), Some("0"), "{stat}");
    }
    assert_eq!(live.sh("test -c /dev/ptmx && ls /dev/pts").await, "ptmx");
    live.shut().await;
}

#[tokio::test]
async fn the_network_is_a_loopback_of_its_own() {
    let live = Live::start(&spec()).await;
    assert_eq!(live.sh("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '").await, "lo");
    for (address, fault) in [("127.0.0.1", "refused"), ("192.0.2.1", "unreachable")] {
        let said = live.sh(&format!("bash -c 'exec 3<>/dev/tcp/{address}/9'")).await;
        assert!(said.contains(fault), "{address}: {said}");
    }
    live.shut().await;
    let live = Live::start(&SandboxSpec { network: Network::Host, ..spec() }).await;
    let host = fs::read_to_string("/proc/net/dev").unwrap().lines().count();
    assert_eq!(live.sh("wc -l < /proc/net/dev").await, host.to_string());
    live.shut().await;
}

#[tokio::test]
async fn disk_is_limited_as_stated() {
    let mut spec = spec();
    (spec.layer_bytes, spec.tmp_bytes) = (8 << 20, 2 << 20);
    let live = Live::start(&spec).await;
    for (folder, fits, too_much) in [("/tmp", 1, 3), ("/dev/shm", 1, 3), ("/workspace", 4, 9), ("/usr", 4, 9)] {
        let fill = |mib: u32| format!("head -c {mib}M /dev/zero > {folder}/x 2>/dev/null && echo fits; rm {folder}/x");
        assert_eq!(live.sh(&fill(fits)).await, "fits", "{folder}");
        assert_eq!(live.sh(&fill(too_much)).await, "", "{folder}");
    }
    live.shut().await;
}

#[tokio::test]
async fn host_names_are_as_ordered() {
    let live = Live::start(&SandboxSpec { hostname: "box-7".to_owned(), ..spec() }).await;
    assert_eq!(live.sh("uname -n; cat /etc/hostname").await, "box-7\nbox-7");
    if live.sandbox.facts().hello.python.is_some() {
        let look_up = "python3 -c 'import socket; print(socket.gethostbyname(\"box-7\"))'";
        assert_eq!(live.sh(look_up).await, "127.0.0.1");
    }
    live.shut().await;
    assert_ne!(nix::unistd::gethostname().unwrap(), "box-7");
}

#[tokio::test]
async fn an_image_is_the_root_and_is_never_written_to() {
    let image = image();
    let listing = |folder: &str| {
        let mut names: Vec<_> =
            fs::read_dir(image.path().join(folder)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = (listing(""), listing("etc"));
    for fakeroot in [false, true] {
        let live = Live::start(&SandboxSpec { fakeroot, ..of_image(image.path()) }).await;
        assert_eq!(
            live.sh("cat /etc/settings; pwd; touch /workspace/x /newly && echo ok").await,
            "of the image\n/workspace\nok"
        );
        assert_eq!(live.sh("rm /etc/settings; ls /etc/settings 2>/dev/null; echo; touch ~/x && echo ok").await, "\nok");
        let user = if fakeroot { "root" } else { "agent" };
        assert_eq!(live.sh("id -un").await, user);
        assert!(live.sh("cat /etc/passwd").await.contains("image:x:4242"));
        live.shut().await;
    }
    assert_eq!((listing(""), listing("etc")), before);
    assert_eq!(fs::read_to_string(image.path().join("etc/settings")).unwrap(), "of the image\n");
}

#[tokio::test]
async fn an_image_with_a_mount_in_it_is_shown_read_only() {
    const ME: &str = "walls::an_image_with_a_mount_in_it_is_shown_read_only";
    if !is_root() {
        return skip(ME, "only root can mount something into an image");
    }
    if !is_alone(ME) {
        return assert_passed(&alone(ME, &["unshare", "--mount", "--propagation", "private"]).output().unwrap());
    }
    let image = image();
    let inside = image.path().join("usr/share");
    nix::mount::mount(Some("none"), &inside, Some("tmpfs"), nix::mount::MsFlags::empty(), Some("mode=755")).unwrap();
    fs::write(inside.join("mounted"), "seen").unwrap();
    let live = Live::start(&of_image(image.path())).await;
    assert_eq!(live.sh("cat /usr/share/mounted /etc/settings; touch x && echo ok").await, "seenof the image\nok");
    assert_eq!(live.sh("touch /usr/share/x 2>/dev/null || echo no; id -un").await, "no\nagent");
    live.shut().await;
    nix::mount::umount(&inside).unwrap();
}

#[tokio::test]
async fn binds_show_what_is_named_and_no_more() {
    let host = tempfile::tempdir().unwrap();
    fs::set_permissions(host.path(), fs::Permissions::from_mode(0o777)).unwrap();
    for name in ["shared", "fixed"] {
        fs::create_dir(host.path().join(name)).unwrap();
        fs::set_permissions(host.path().join(name), fs::Permissions::from_mode(0o777)).unwrap();
        fs::write(host.path().join(name).join("file"), name).unwrap();
    }
    let bind = |from: &str, to: &str, writable| Bind { source: host.path().join(from), target: to.into(), writable };
    let binds = vec![
        bind("shared", "/workspace/shared", true),
        bind("fixed", "/data/deep/fixed", false),
        bind("fixed/file", "/usr/share/prorl-test/file", false),
        bind("fixed", "/lib/prorl-test", false), // by a link of the host's, on most
        bind("fixed/file", "/tmp/prorl-test/file", false),
    ];
    let image = image();
    for spec in [spec(), of_image(image.path())] {
        let live = Live::start(&SandboxSpec { binds: binds.clone(), ..spec }).await;
        assert_eq!(
            live.sh("cat /workspace/shared/file /data/deep/fixed/file /usr/share/prorl-test/file").await,
            "sharedfixedfixed"
        );
        assert_eq!(live.sh("cat /lib/prorl-test/file /tmp/prorl-test/file").await, "fixedfixed");
        assert_eq!(live.sh("echo new > /workspace/shared/out && echo ok").await, "ok");
        for path in ["/data/deep/fixed/file", "/data/deep/fixed/other", "/usr/share/prorl-test/file"] {
            assert_eq!(live.sh(&format!("(echo x > {path}) 2>/dev/null || echo no")).await, "no", "{path}");
        }
        live.shut().await;
        assert_eq!(fs::read_to_string(host.path().join("shared/out")).unwrap(), "new\n");
    }
    assert_eq!(fs::read_to_string(host.path().join("fixed/file")).unwrap(), "fixed");
}

#[tokio::test]
async fn signals_that_the_host_ignores_work_inside() {
    const ME: &str = "walls::signals_that_the_host_ignores_work_inside";
    if !is_alone(ME) {
        let deaf = ["sh", "-c", "trap '' HUP INT TERM USR1; exec \"$@\"", "sh"];
        return assert_passed(&alone(ME, &deaf).output().unwrap());
    }
    let live = Live::start(&spec()).await;
    for mask in status(&live, &["SigIgn", "SigBlk"]).await {
        let mask = u64::from_str_radix(&mask, 16).unwrap();
        // Signals 32 and 33 are the C library's own, which lets nobody touch them.
        assert_eq!(mask & !(0b11 << 31), 0, "{mask:x}");
    }
    live.shut().await;
}

#[tokio::test]
async fn cores_and_open_files_are_limited() {
    let live = Live::start(&spec()).await;
    let open_files: u64 = live.sh("ulimit -n").await.parse().unwrap();
    assert!(open_files <= 4096, "{open_files}");
    // One byte, where the host's own limit allows it: the kernel would still start a `core_pattern` that is a pipe at 0.
    let (_, hard) = getrlimit(Resource::RLIMIT_CORE).unwrap();
    let cores = if hard == 0 && !is_root() { "0" } else { "1" };
    for pid in ["1", "self"] {
        let limits = live.sh(&format!("cat /proc/{pid}/limits")).await;
        let values = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).unwrap_or_default();
        assert_eq!(values.split_whitespace().collect::<Vec<_>>(), [cores, cores, "bytes"], "{limits}");
    }
    live.shut().await;
}

#[tokio::test]
async fn no_further_namespace_can_be_made() {
    let settings = || {
        let mut entries: Vec<_> = fs::read_dir("/proc/sys/user").unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        entries.iter().map(|path| fs::read_to_string(path).unwrap()).collect::<Vec<_>>()
    };
    let before = settings();
    for spec in [spec(), fakeroot()] {
        let live = Live::start(&spec).await;
        assert_eq!(live.sh("unshare -Ur true >/dev/null 2>&1 && echo made").await, "");
        let limits = live.sh("cat /proc/sys/user/max_*_namespaces").await;
        assert!(limits.lines().count() > 0 && limits.lines().all(|limit| limit == "0"), "{limits}");
        let undo = "(echo 9 > /proc/sys/user/max_user_namespaces) 2>/dev/null; cat /proc/sys/user/max_user_namespaces";
        assert_eq!(live.sh(undo).await, "0");
        live.shut().await;
    }
    assert_eq!(settings(), before);
}

#[tokio::test]
async fn terminals_are_limited() {
    let live = Live::start(&spec()).await;
    if live.sandbox.facts().hello.python.is_none() {
        return skip("terminals_are_limited", "no python3 here");
    }
    let script = "
import os
held = []
try:
    while len(held) < 1000: held.append(os.open(\"/dev/ptmx\", os.O_RDWR | os.O_NOCTTY))
except OSError as error: print(len(held), error.errno)";
    // ENOSPC.
    assert_eq!(live.sh(&format!("python3 -c '{script}'")).await, "64 28");
    live.shut().await;
}

/// As container runtimes mount drivers.
#[tokio::test]
async fn programs_with_a_mount_among_them_are_shown_read_only() {
    const ME: &str = "walls::programs_with_a_mount_among_them_are_shown_read_only";
    if !is_root() {
        return skip(ME, "only root can mount something into /usr");
    }
    if !is_alone(ME) {
        return assert_passed(&alone(ME, &["unshare", "--mount", "--propagation", "private"]).output().unwrap());
    }
    let folder = Path::new("/usr/local");
    nix::mount::mount(Some("none"), folder, Some("tmpfs"), nix::mount::MsFlags::empty(), Some("mode=755")).unwrap();
    fs::write(folder.join("mounted"), "seen").unwrap();
    let live = Live::start(&fakeroot()).await;
    assert_eq!(live.sh("cat /usr/local/mounted; touch x && echo ok").await, "seenok");
    assert_eq!(live.sh("touch /usr/x /usr/local/x >/dev/null 2>&1 || echo no").await, "no");
    live.shut().await;
    nix::mount::umount(folder).unwrap();
}
