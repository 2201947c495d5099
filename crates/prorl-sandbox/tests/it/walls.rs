//! What code in a sandbox can see, reach and change.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
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
        assert_eq!(live.sh("id -u; id -un; id -G | wc -w").await, format!("{uid}\n{name}\n1"));
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
    let script = "grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status | tr -d '\\t'";
    let live = Live::start(&spec()).await;
    assert_eq!(live.sh(script).await, "CapEff:0000000000000000\nCapBnd:0000000000000000\nNoNewPrivs:1");
    live.shut().await;
    let live = Live::start(&fakeroot()).await;
    assert_eq!(live.sh(script).await, "CapEff:00000000000004fb\nCapBnd:00000000000004fb\nNoNewPrivs:1");
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
        assert_eq!(live.sh(&format!("find / -xdev -name '{name}*' 2>/dev/null; echo searched")).await, "searched");
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
    assert_eq!(live.sh("cut -d' ' -f5 /proc/self/mountinfo | grep -c '^/$'").await, "1");
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
    let pids = live.sh("ls /proc | grep -E '^[0-9]+$' | sort -n | head -1; ls /proc | grep -cE '^[0-9]+$'").await;
    let (first, count) = pids.split_once('\n').unwrap();
    assert_eq!(first, "1");
    assert!(count.parse::<u32>().unwrap() < 10, "{count} processes");
    live.shut().await;
}

#[tokio::test]
async fn kernel_settings_cannot_be_written() {
    let pattern = || fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    let before = pattern();
    for spec in [spec(), fakeroot()] {
        let live = Live::start(&spec).await;
        for setting in ["kernel/core_pattern", "kernel/hostname", "vm/drop_caches", "net/ipv4/ip_default_ttl"] {
            let script = format!(
                "test -e /proc/sys/{setting} || exit 0; (echo 1 > /proc/sys/{setting}) 2>/dev/null && echo written"
            );
            assert_eq!(live.sh(&script).await, "", "{setting}");
        }
        // Read-only for a fake root too, should a later kernel ask for less than a capability.
        assert_eq!(live.sh("grep -c '^proc /proc/sys proc ro,' /proc/mounts").await, "1");
        assert_eq!(
            live.sh("(umount /proc/sys || mount -o remount,rw /proc/sys) >/dev/null 2>&1 && echo open").await,
            ""
        );
        live.shut().await;
    }
    assert_eq!(pattern(), before);
}

#[tokio::test]
async fn the_guest_cannot_be_opened_from_inside() {
    for spec in [spec(), fakeroot()] {
        let live = Live::start(&spec).await;
        assert_eq!(
            live.sh("ls /proc/1/fd /proc/1/root /proc/1/map_files 2>/dev/null; cat /proc/1/environ 2>/dev/null").await,
            ""
        );
        let steal = "import ctypes\nlibc = ctypes.CDLL(None)\npidfd = libc.syscall(434, 1, 0)\nprint(pidfd > 0, libc.syscall(438, pidfd, 0, 0), libc.ptrace(16, 1, 0, 0))";
        if live.sandbox.facts().hello.python.is_some() {
            assert_eq!(live.sh(&format!("python3 -c '{steal}'")).await, "True -1 -1");
        }
        // Nothing of the guest's is open in what it starts.
        assert_eq!(live.sh("ls -l /proc/$$/fd | grep -c -E 'socket|memfd'").await, "0");
        assert_eq!(live.sh("kill -KILL 1; kill -TERM 1; echo alive").await.lines().last(), Some("alive"));
        live.shut().await;
    }
}

#[tokio::test]
async fn there_is_no_controlling_terminal() {
    let live = Live::start(&spec()).await;
    assert_eq!(live.sh("(exec 3<> /dev/tty) 2>/dev/null && echo tty; ps -o tty= -p 1").await, "?");
    assert_eq!(live.sh("test -c /dev/ptmx && ls /dev/pts").await, "ptmx");
    live.shut().await;
}

#[tokio::test]
async fn the_network_is_a_loopback_of_its_own() {
    let live = Live::start(&spec()).await;
    assert_eq!(live.sh("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '").await, "lo");
    let reach =
        |to: &str| format!("bash -c 'exec 3<>/dev/tcp/{to}/9' 2>&1 | head -1 | grep -o -E 'refused|unreachable'");
    assert_eq!(live.sh(&reach("127.0.0.1")).await, "refused", "loopback is up");
    assert_eq!(live.sh(&reach("192.0.2.1")).await, "unreachable");
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
    assert_eq!(live.sh("hostname; cat /etc/hostname; getent hosts box-7 | wc -l").await, "box-7\nbox-7\n1");
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
    ];
    let image = image();
    for spec in [spec(), of_image(image.path())] {
        let live = Live::start(&SandboxSpec { binds: binds.clone(), ..spec }).await;
        assert_eq!(
            live.sh("cat /workspace/shared/file /data/deep/fixed/file /usr/share/prorl-test/file").await,
            "sharedfixedfixed"
        );
        assert_eq!(live.sh("echo new > /workspace/shared/out && echo ok").await, "ok");
        for path in ["/data/deep/fixed/file", "/data/deep/fixed/other", "/usr/share/prorl-test/file"] {
            assert_eq!(live.sh(&format!("(echo x > {path}) 2>/dev/null || echo no")).await, "no", "{path}");
        }
        live.shut().await;
        assert_eq!(fs::read_to_string(host.path().join("shared/out")).unwrap(), "new\n");
    }
    assert_eq!(fs::read_to_string(host.path().join("fixed/file")).unwrap(), "fixed");
}

/// Even a file of root's that is shown writable on purpose stays root's.
#[tokio::test]
async fn roots_files_cannot_be_opened() {
    if !is_root() {
        return skip("roots_files_cannot_be_opened", "only root can make such a file");
    }
    let host = tempfile::tempdir().unwrap();
    fs::set_permissions(host.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let secret = host.path().join("secret");
    fs::write(&secret, "root's").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    for spec in [spec(), fakeroot()] {
        let binds = vec![Bind { source: host.path().to_owned(), target: "/data".into(), writable: true }];
        let live = Live::start(&SandboxSpec { binds, ..spec }).await;
        let script = "(cat /data/secret; echo x > /data/secret; touch /data/new; chmod 777 /data; rm /data/secret) 2>/dev/null; ls /data";
        assert_eq!(live.sh(script).await, "secret");
        live.shut().await;
    }
    assert_eq!(fs::read_to_string(secret).unwrap(), "root's");
}

#[tokio::test]
async fn signals_that_the_host_ignores_work_inside() {
    const ME: &str = "walls::signals_that_the_host_ignores_work_inside";
    if !is_alone(ME) {
        let deaf = ["sh", "-c", "trap '' HUP INT TERM USR1; exec \"$@\"", "sh"];
        return assert_passed(&alone(ME, &deaf).output().unwrap());
    }
    let live = Live::start(&spec()).await;
    let masks = live.sh("grep -E '^Sig(Ign|Blk)' /proc/self/status").await;
    for line in masks.lines() {
        let mask = u64::from_str_radix(line.split_whitespace().last().unwrap(), 16).unwrap();
        // Signals 32 and 33 are the C library's own, which lets nobody touch them.
        assert_eq!(mask & !(0b11 << 31), 0, "{line}");
    }
    live.shut().await;
}

#[tokio::test]
async fn cores_and_open_files_are_limited() {
    let live = Live::start(&spec()).await;
    let limits = live.sh("ulimit -c; ulimit -n").await;
    let open_files: u64 = limits.strip_prefix("0\n").unwrap().parse().unwrap();
    assert!(open_files <= 4096, "{open_files}");
    live.shut().await;
}
