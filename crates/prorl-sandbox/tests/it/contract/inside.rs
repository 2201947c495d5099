//! What a task sees, reaches and changes; and what keeps a sandbox from standing.

use std::{
    ffi::OsStr,
    fs,
    net::{Ipv4Addr, TcpListener},
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    path::{Path, PathBuf},
};

use nix::sys::stat::{Mode, umask};
use prorl_core::FailureClass;
use prorl_sandbox::{Bind, Image, Network, SandboxError, SandboxSpec};
use prorl_tools::{host::ExecSpec, wire::ExitStatus};

use super::{Ground, KilledOnDrop, open_folder};
use crate::support::{LONG, Live, alone, assert_passed, image, is_alone, is_root, sandbox_uid};

pub(super) async fn the_image_is_the_root_and_is_never_written_to(ground: &Ground) {
    let listing = |folder: &str| {
        let mut names: Vec<_> =
            fs::read_dir(ground.image.path().join(folder)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = (listing(""), listing("etc"), listing("usr"), listing("var/data"));
    for spec in [ground.spec(), ground.fakeroot()] {
        let live = ground.start(&spec).await;
        assert_eq!(
            live.sh("cat /etc/settings; touch /newly /usr/x /var/data/x /etc/x /bin/x && echo ok").await,
            "of the image\nok"
        );
        assert_eq!(live.sh("rm /etc/settings /bin/id; ls /etc/settings /bin/id 2>/dev/null; echo end").await, "end");
        assert_eq!(
            live.sh("mkdir /opt /opt/a; echo x > /opt/a/b; rm -r /opt; cat /bin/sh | head -c 4 | tail -c 3").await,
            "ELF"
        );
        assert!(live.sh("cat /etc/passwd").await.contains("image:x:4242"));
        // Its own ones, whatever the image has.
        assert_eq!(live.sh("stat -c %a /tmp /var/tmp /root /dev/shm").await, "1777\n1777\n700\n1777");
        live.shut().await;
    }
    assert_eq!((listing(""), listing("etc"), listing("usr"), listing("var/data")), before);
    assert_eq!(fs::read_to_string(ground.image.path().join("etc/settings")).unwrap(), "of the image\n");
}

pub(super) async fn the_layer_and_the_temporary_folders_are_limited(ground: &Ground) {
    let live = ground.start(&SandboxSpec { layer_bytes: 8 << 20, tmp_bytes: 2 << 20, ..ground.spec() }).await;
    for (folder, fits, too_much) in [("/tmp", 1, 3), ("/dev/shm", 1, 3), ("/workspace", 4, 9), ("/usr", 4, 9)] {
        let fill = |mib: u32| format!("head -c {mib}M /dev/zero > {folder}/x 2>/dev/null && echo fits; rm {folder}/x");
        assert_eq!(live.sh(&fill(fits)).await, "fits", "{folder}");
        assert_eq!(live.sh(&fill(too_much)).await, "", "{folder}");
        let said = live.sh(&format!("LC_ALL=C head -c {too_much}M /dev/zero > {folder}/x; rm {folder}/x")).await;
        assert!(said.contains("No space left on device"), "{folder}: {said}");
    }
    live.shut().await;
}

/// A folder that the sandboxes' user may write to, with a file in it.
fn shared_folder(at: &Path, text: &str) -> PathBuf {
    fs::create_dir_all(at).unwrap();
    fs::write(at.join("file"), text).unwrap();
    fs::set_permissions(at, fs::Permissions::from_mode(0o777)).unwrap();
    at.to_owned()
}

pub(super) async fn binds_show_what_is_named_and_no_more(ground: &Ground) {
    let host = open_folder();
    let shared = shared_folder(&host.path().join("shared"), "shared");
    let fixed = shared_folder(&host.path().join("fixed"), "fixed");
    let bind = |source: &Path, target: &str, writable| Bind { source: source.into(), target: target.into(), writable };
    let binds = vec![
        bind(&shared, "/workspace/shared", true),
        bind(&fixed, "/data/deep/fixed", false),
        bind(&fixed.join("file"), "/usr/share/prorl-test/file", false),
        bind(Path::new("/dev/full"), "/workspace/device", true),
    ];
    let live = ground.start(&SandboxSpec { binds, ..ground.spec() }).await;
    assert_eq!(
        live.sh("cat /workspace/shared/file /data/deep/fixed/file /usr/share/prorl-test/file").await,
        "sharedfixedfixed"
    );
    assert_eq!(live.sh("echo new > /workspace/shared/out && echo ok").await, "ok");
    for path in ["/data/deep/fixed/file", "/data/deep/fixed/other", "/usr/share/prorl-test/file"] {
        assert_eq!(live.sh(&format!("(echo x > {path}) 2>/dev/null || echo no")).await, "no", "{path}");
    }
    assert!(live.sh("LC_ALL=C; echo x > /workspace/device").await.contains("No space left"));
    assert_eq!(live.sh("ls -d /.prorl /host 2>/dev/null").await, "");
    live.shut().await;
    assert_eq!(fs::read_to_string(shared.join("out")).unwrap(), "new\n");
    assert_eq!(fs::read_to_string(fixed.join("file")).unwrap(), "fixed");
}

pub(super) async fn binds_go_where_the_images_links_lead(ground: &Ground) {
    const LINKS: &str = "readlink /share /var/absolute /var/missing /var/upwards";
    let host = open_folder();
    let folder = shared_folder(&host.path().join("folder"), "shown");
    let bind = |source: &Path, target: &str| Bind { source: source.into(), target: target.into(), writable: false };
    let binds = vec![
        bind(&folder, "/share/one"),
        bind(&folder, "/var/absolute/two/deep"),
        bind(&folder, "/var/missing"),
        bind(&folder, "/var/upwards/four"),
        bind(&folder.join("file"), "/var/absolute/file"),
        bind(&folder.join("file"), "/bin/sh.d/file"),
    ];
    let mut specs = vec![ground.spec()];
    // Nothing can be made in a folder of somebody else's, but it can be in a layer over it.
    let foreign = image();
    specs.push(SandboxSpec { image: Image::Directory(foreign.path().to_owned()), ..ground.spec() });
    for spec in specs {
        let live = ground.start(&SandboxSpec { binds: binds.clone(), ..spec }).await;
        for folder in
            ["/share/one", "/usr/share/one", "/var/data/two/deep", "/var/data/missing/deep", "/usr/share/four"]
        {
            assert_eq!(live.sh(&format!("cat {folder}/file")).await, "shown", "{folder}");
        }
        assert_eq!(live.sh("cat /var/data/file /var/absolute/file /bin/sh.d/file").await, "shownshownshown");
        assert_eq!(live.sh(LINKS).await, "usr/share\n/var/data\ndata/missing/deep\n../../../../../usr/share");
        // Folders on the way keep what else is in them, and their modes.
        assert_eq!(live.sh("ls -d /bin/bash; stat -c %a /var/data /usr/share").await, "/bin/bash\n755\n755");
        live.shut().await;
    }
    let own = SandboxSpec { binds: vec![bind(&folder, "/var/process/sys")], ..ground.spec() };
    let error = ground.refusal(&own).await.to_string();
    assert_eq!(error, "failed to set up the sandbox at: make bind target /var/process/sys");
}

pub(super) async fn binds_go_into_the_temporary_folders(ground: &Ground) {
    let host = open_folder();
    let folder = shared_folder(&host.path().join("folder"), "shown");
    let bind = |source: &Path, target: &str, writable| Bind { source: source.into(), target: target.into(), writable };
    let binds = vec![
        bind(&folder, "/tmp/deep/folder", true),
        bind(&folder.join("file"), "/tmp/file", false),
        bind(&folder, "/dev/shm/folder", false),
        bind(&folder, "/var/tmp/folder", false),
        // In a folder of the host's, in which nothing is made.
        bind(&folder.join("file"), "/tmp/deep/folder/file", false),
    ];
    let live = ground.start(&SandboxSpec { binds, ..ground.spec() }).await;
    for path in ["/tmp/deep/folder/file", "/tmp/file", "/dev/shm/folder/file", "/var/tmp/folder/file"] {
        assert_eq!(live.sh(&format!("cat {path}")).await, "shown", "{path}");
        assert_eq!(live.sh(&format!("(echo x > {path}) 2>/dev/null || echo no")).await, "no", "{path}");
    }
    assert_eq!(live.sh("echo new > /tmp/deep/folder/new; stat -c %a /tmp /dev/shm /var/tmp").await, "1777\n1777\n1777");
    live.shut().await;
    assert_eq!(fs::read_to_string(folder.join("new")).unwrap(), "new\n");
}

/// It runs alone, as a umask is the whole process's.
pub(super) async fn a_hosts_umask_stays_outside(ground: &Ground) {
    let me = format!("contract::{}::a_hosts_umask_stays_outside", ground.name);
    if !is_alone(&me) {
        return assert_passed(&alone(&me, &[]).output().unwrap());
    }
    umask(Mode::from_bits_truncate(0o077));
    for spec in [ground.spec(), ground.fakeroot()] {
        let live = ground.start(&spec).await;
        for path in ["/", "/etc", "/workspace", "/home", "/var", "/usr", "/bin"] {
            assert_eq!(live.sh(&format!("stat -c %a {path}")).await, "755", "{path}");
        }
        assert_eq!(live.sh("stat -c %a /etc/passwd /etc/hosts /etc/hostname").await, "644\n644\n644");
        assert_eq!(live.sh("umask; touch x; stat -c %a x").await, "0022\n644");
        live.shut().await;
    }
}

pub(super) async fn names_of_any_bytes_are_taken(ground: &Ground) {
    let host = open_folder();
    for name in [&b"a:b,c=d"[..], b"new\nline \"quoted\" \\ $HOME", b"not \xff utf-8"] {
        let name = OsStr::from_bytes(name);
        let image = host.path().join(name);
        fs::rename(ground.image.path(), &image).unwrap();
        let mut source_name = name.to_owned();
        source_name.push(".d");
        let source = shared_folder(&host.path().join(source_name), "bound");
        let mut target = OsStr::new("/data/").to_owned();
        target.push(name);
        let binds = vec![Bind { source, target: target.into(), writable: false }];
        let spec = SandboxSpec { image: Image::Directory(image.clone()), binds, ..ground.spec() };
        let live = ground.start(&spec).await;
        assert_eq!(live.sh("cat /data/*/file /etc/settings").await, "boundof the image", "{}", name.display());
        live.shut().await;
        fs::rename(image, ground.image.path()).unwrap();
    }
}

/// User ids of a process as the host sees them: real, effective, saved, of the file system.
fn uids_outside(pid: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    uids.split_whitespace().map(|uid| uid.parse().unwrap()).collect()
}

/// Asserts that every process of a sandbox is one ordinary user's outside.
fn assert_nobody_is_root_outside(live: &Live) {
    for process in live.processes() {
        let uids = uids_outside(process.pid);
        assert!(uids.iter().all(|uid| *uid == sandbox_uid()), "{}: {uids:?}", process.pid);
    }
}

pub(super) async fn the_user_is_ones_own(ground: &Ground) {
    let live = ground.start(&ground.spec()).await;
    assert_eq!(live.sandbox.facts().runtime, ground.runtime.name());
    assert_eq!(live.sh("id -u; id -un").await, format!("{}\nagent", sandbox_uid()));
    assert_eq!(live.sandbox.facts().hello.uid, sandbox_uid());
    assert_eq!(live.sandbox.facts().hello.fakeroot, None);
    // Nobody but root can leave its other groups, and those have no number of their own inside.
    let (groups, own) = (live.sh("id -G").await, live.sh("id -g").await);
    assert!(groups.split(' ').all(|group| group == own || group == "65534"), "{groups}");
    assert_nobody_is_root_outside(&live);
    let status = live.sh("cat /proc/self/status").await;
    for line in ["CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(line), "{line} in {status}");
    }
    live.shut().await;
}

pub(super) async fn a_fake_root_is_root_inside_alone(ground: &Ground) {
    let live = ground.start(&ground.fakeroot()).await;
    assert_eq!(live.sh("id -u; id -un; id -g; echo ~").await, "0\nroot\n0\n/root");
    assert!(live.sandbox.facts().hello.fakeroot.is_some());
    assert_eq!(live.sh("touch x; chown 1:1 x && chown 0:0 x && echo ok").await, "ok");
    assert_eq!(live.sh("mount -t tmpfs x /tmp >/dev/null 2>&1 || echo no").await, "no");
    assert_nobody_is_root_outside(&live);
    live.shut().await;
}

pub(super) async fn the_environment_is_clean_and_as_ordered(ground: &Ground) {
    let long = "x'\"$(id)\n\t".repeat(1000);
    let env = [("ANSWER", "4 2\n'\"$x"), ("LANG", "C"), ("LONG", &long)];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let live = ground.start(&SandboxSpec { env, ..ground.spec() }).await;
    let seen = live.tools.exec(&ExecSpec::new(["env", "-0"]), LONG).await.unwrap();
    let seen = seen.stdout.text();
    let mut seen: Vec<_> = seen.split_terminator('\0').collect();
    seen.sort_unstable();
    let long = format!("LONG={long}");
    let expected = [
        "ANSWER=4 2\n'\"$x",
        "HOME=/home/agent",
        "LANG=C",
        "LOGNAME=agent",
        &long,
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SHELL=/bin/bash",
        "TERM=dumb",
        "USER=agent",
    ];
    let seen: Vec<_> = seen.into_iter().filter(|variable| !variable.starts_with("PWD=")).collect();
    assert_eq!(seen, expected);
    for process in live.processes() {
        // In nobody's arguments, and not in a launcher's environment either.
        let told =
            ["cmdline", "environ"].map(|file| fs::read(format!("/proc/{}/{file}", process.pid)).unwrap_or_default());
        let told = told.concat();
        assert!(!told.windows(7).any(|part| part == b"ANSWER="), "{}", String::from_utf8_lossy(&told));
    }
    live.shut().await;
}

pub(super) async fn the_working_folder_and_the_home_are_writable(ground: &Ground) {
    for (spec, home) in [(ground.spec(), "/home/agent"), (ground.fakeroot(), "/root")] {
        let live = ground.start(&SandboxSpec { hostname: "box-7".to_owned(), ..spec }).await;
        let said = live.sh("pwd; touch here ~/there /tmp/x /dev/shm/x && echo ~").await;
        assert_eq!(said, format!("/workspace\n{home}"));
        assert_eq!(live.sh("cat /proc/sys/kernel/hostname /etc/hostname").await, "box-7\nbox-7");
        assert!(live.sh("cat /etc/hosts").await.contains("127.0.0.1\tlocalhost box-7"));
        live.shut().await;
    }
}

pub(super) async fn without_network_there_is_a_loopback_of_its_own(ground: &Ground) {
    let live = ground.start(&ground.spec()).await;
    assert_eq!(live.sandbox.facts().loopback, None);
    let devices = live.sh("tail -n +3 /proc/net/dev").await;
    let names: Vec<_> = devices.lines().filter_map(|line| line.split(':').next()).map(str::trim).collect();
    assert_eq!(names, ["lo"]);
    for (address, fault) in [("127.0.0.1", "refused"), ("192.0.2.1", "unreachable")] {
        let said = live.sh(&format!("LC_ALL=C bash -c 'exec 3<>/dev/tcp/{address}/9'")).await;
        assert!(said.contains(fault), "{address}: {said}");
    }
    live.shut().await;
}

pub(super) async fn on_the_hosts_network_each_has_an_address_of_its_own(ground: &Ground) {
    let spec = SandboxSpec { network: Network::Host, hostname: "box-8".to_owned(), ..ground.spec() };
    let (one, two) = tokio::join!(ground.start(&spec), ground.start(&spec));
    let address = |live: &Live| live.sandbox.facts().loopback.unwrap();
    assert_ne!(address(&one), address(&two));
    for live in [&one, &two] {
        let own = address(live);
        assert!(own.is_loopback() && own != Ipv4Addr::LOCALHOST, "{own}");
        assert_eq!(live.sh("echo $PRORL_LOOPBACK").await, own.to_string());
        assert!(live.sh("cat /etc/hosts").await.contains(&format!("{own}\tbox-8")));
        let resolv_conf = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
        assert_eq!(live.sh("cat /etc/resolv.conf").await, resolv_conf.trim_end());
        // It is the host's own network: what listens there can be reached from inside.
        let listener = TcpListener::bind((own, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(live.sh(&format!("exec 3<>/dev/tcp/box-8/{port} && echo reached")).await, "reached");
    }
    let devices = fs::read_to_string("/proc/net/dev").unwrap();
    assert_eq!(one.sh("cat /proc/net/dev").await.lines().count(), devices.lines().count());
    one.shut().await;
    two.shut().await;
}

pub(super) async fn exit_codes_and_signals_pass(ground: &Ground) {
    let live = ground.start(&ground.spec()).await;
    let status = async |script: &str| live.tools.exec(&ExecSpec::new(["sh", "-c", script]), LONG).await.unwrap().status;
    assert_eq!(status("exit 0").await, ExitStatus::Code(0));
    assert_eq!(status("exit 42").await, ExitStatus::Code(42));
    assert_eq!(status("exit 255").await, ExitStatus::Code(255));
    assert_eq!(status("kill -KILL $$").await, ExitStatus::Signal(9));
    assert_eq!(status("kill -TERM $$").await, ExitStatus::Signal(15));
    assert_eq!(status("trap 'exit 7' USR1; kill -USR1 $$; exit 8").await, ExitStatus::Code(7));
    assert_eq!(status("sleep 1000 & kill $!; wait $!").await, ExitStatus::Code(128 + 15));
    live.shut().await;
}

pub(super) async fn files_terminals_cores_and_namespaces_are_limited(ground: &Ground) {
    for spec in [ground.spec(), ground.fakeroot()] {
        let live = ground.start(&spec).await;
        let open_files: u64 = live.sh("ulimit -n").await.parse().unwrap();
        assert!(open_files <= 4096, "{open_files}");
        let limits = live.sh("cat /proc/1/limits").await;
        let cores = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).unwrap();
        assert!(cores.split_whitespace().take(2).all(|bytes| ["0", "1"].contains(&bytes)), "{cores}");
        let terminals =
            "n=0; while [ $n -lt 200 ] && { exec {fd}<>/dev/ptmx; } 2>/dev/null; do n=$((n+1)); done; echo $n";
        assert_eq!(live.sh(&format!("bash -c '{terminals}'")).await, "64");
        assert_eq!(live.sh("unshare -Ur true >/dev/null 2>&1 && echo made").await, "");
        assert_eq!(live.sh("cat /proc/sys/user/max_user_namespaces").await, "0");
        live.shut().await;
    }
}

pub(super) async fn nothing_of_the_host_is_in_reach(ground: &Ground) {
    let live = ground.start(&ground.spec()).await;
    assert_eq!(live.sh("ls -d /host /layer /image /.prorl /.singularity.d /sys/* 2>/dev/null").await, "");
    let mounts = live.sh("cat /proc/self/mountinfo").await;
    let targets: Vec<_> = mounts.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    assert_eq!(targets.iter().filter(|target| **target == "/").count(), 1, "{mounts}");
    assert!(!targets.contains(&"/sys"), "{mounts}");
    assert_eq!(
        live.sh("echo /dev/*").await,
        "/dev/fd /dev/full /dev/null /dev/ptmx /dev/pts /dev/random /dev/shm /dev/stderr /dev/stdin /dev/stdout /dev/tty /dev/urandom /dev/zero"
    );
    let pids: Vec<u32> = live.sh("ls /proc").await.lines().filter_map(|name| name.parse().ok()).collect();
    assert!(pids.contains(&1) && pids.len() < 10, "{pids:?}");
    assert_eq!(live.sh("(exec 3<> /dev/tty) 2>/dev/null && echo tty").await, "");
    assert_eq!(live.sh("ls /proc/$$/fd; :").await.lines().collect::<Vec<_>>(), ["0", "1", "2"]);
    let facts = live.sandbox.facts();
    let links = live.sh("ls -l /proc/self/ns/pid /proc/self/ns/user").await;
    for inode in [facts.hello.pid_namespace, facts.hello.user_namespace] {
        assert!(links.contains(&format!("[{inode}]")), "{links}");
    }
    live.shut().await;
}

pub(super) async fn the_guest_cannot_be_opened_from_inside(ground: &Ground) {
    for spec in [ground.spec(), ground.fakeroot()] {
        let live = ground.start(&spec).await;
        assert_eq!(
            live.sh("ls /proc/1/root /proc/1/map_files/* 2>/dev/null; cat /proc/1/environ 2>/dev/null").await,
            ""
        );
        // The numbers may be seen, but not what they stand for.
        let open = live.sh("ls -l /proc/1/fd 2>/dev/null; cat /proc/1/fdinfo/* 2>/dev/null").await;
        assert!(!open.contains("->") && !open.contains("flags"), "{open}");
        let open = live.sh("ls -l /proc/$$/fd").await;
        assert!(!open.contains("socket") && !open.contains("memfd"), "{open}");
        assert_eq!(live.sh("kill -KILL 1; kill -TERM 1; echo alive").await.lines().last(), Some("alive"));
        live.shut().await;
    }
}

pub(super) async fn the_kernels_settings_and_roots_things_are_out_of_reach(ground: &Ground) {
    let pattern = || fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    let before = pattern();
    let host = open_folder();
    let secret = host.path().join("secret");
    fs::write(&secret, "root's").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let mut bystander = KilledOnDrop(std::process::Command::new("sleep").arg("1000").spawn().unwrap());
    for spec in [ground.spec(), ground.fakeroot()] {
        let binds = vec![Bind { source: host.path().to_owned(), target: "/data".into(), writable: true }];
        let live = ground.start(&SandboxSpec { binds, ..spec }).await;
        for setting in ["kernel/core_pattern", "kernel/hostname", "vm/drop_caches"] {
            let script = format!("(echo 1 > /proc/sys/{setting}) 2>/dev/null && echo written");
            assert_eq!(live.sh(&script).await, "", "{setting}");
        }
        let mounts = live.sh("cat /proc/mounts").await;
        assert!(mounts.lines().any(|line| line.starts_with("proc /proc/sys proc ro,")), "{mounts}");
        assert_eq!(
            live.sh("(umount /proc/sys || mount -o remount,rw /proc/sys) >/dev/null 2>&1 && echo open").await,
            ""
        );
        if is_root() {
            // Even shown writable on purpose, a file of root's stays root's; and no process of root's can be signalled.
            let script = "(cat /data/secret; echo x > /data/secret; touch /data/new; chmod 777 /data; rm /data/secret) 2>/dev/null; ls /data";
            assert_eq!(live.sh(script).await, "secret");
        }
        let script = format!(
            "kill -KILL {0} 2>/dev/null && echo killed; kill -KILL -{0} 2>/dev/null && echo killed",
            bystander.0.id()
        );
        assert_eq!(live.sh(&script).await, "");
        live.shut().await;
    }
    assert!(bystander.0.try_wait().unwrap().is_none());
    assert_eq!(fs::read_to_string(&secret).unwrap(), "root's");
    assert_eq!(pattern(), before);
}

pub(super) async fn an_image_without_a_shell_will_do(ground: &Ground) {
    let image = open_folder();
    fs::create_dir(image.path().join("only")).unwrap();
    fs::write(image.path().join("only/file"), "there").unwrap();
    let spec = SandboxSpec { image: Image::Directory(image.path().to_owned()), ..ground.spec() };
    let live = ground.start(&spec).await;
    assert_eq!(live.sandbox.facts().hello.bash, None);
    let error = live.tools.exec(&ExecSpec::new(["/bin/sh", "-c", "true"]), LONG).await;
    assert!(error.is_err(), "{error:?}");
    live.shut().await;
}

pub(super) async fn what_is_missing_or_closed_is_named(ground: &Ground) {
    let named = |error: &SandboxError, path: &Path| {
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error} names {}", path.display());
    };
    let missing = PathBuf::from("/nonexistent/image");
    let error = ground.refusal(&SandboxSpec { image: Image::Directory(missing.clone()), ..ground.spec() }).await;
    assert_eq!(error.failure_class(), FailureClass::Image);
    named(&error, &missing);

    let binds = vec![Bind { source: "/nonexistent/source".into(), target: "/data".into(), writable: false }];
    let error = ground.refusal(&SandboxSpec { binds, ..ground.spec() }).await;
    assert_eq!(error.failure_class(), FailureClass::Handler);
    named(&error, Path::new("/nonexistent/source"));

    if is_root() {
        // Root can see them, but the sandbox's user cannot.
        let closed = open_folder();
        let inside = closed.path().join("inside");
        fs::create_dir(&inside).unwrap();
        fs::set_permissions(closed.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let spec = SandboxSpec { image: Image::Directory(closed.path().to_owned()), ..ground.spec() };
        let error = ground.refusal(&spec).await;
        assert_eq!(error.failure_class(), FailureClass::Image, "{error}");
        named(&error, closed.path());
        let binds = vec![Bind { source: inside.clone(), target: "/data".into(), writable: false }];
        let error = ground.refusal(&SandboxSpec { binds, ..ground.spec() }).await;
        assert_eq!(error.failure_class(), FailureClass::Handler, "{error}");
        named(&error, &inside);
    }
    let left = fs::read_dir(ground.node.folder().join("boxes")).unwrap().count();
    assert_eq!(left, 0, "records of starts that failed");
}
