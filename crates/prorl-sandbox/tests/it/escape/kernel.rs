//! Calls, tables and settings of the kernel.

use std::fmt::Write as _;

use super::{Attack, Den, Proof, attack};

/// A call by its number, with arguments that do no harm where it is made, and that are refused for another reason there.
fn by_number(name: &str, number: libc::c_long, arguments: &str, refusal: &'static str, proof: Proof) -> Attack {
    attack(name, format!("call({number}, {arguments})"), &[refusal], proof)
}

pub(super) async fn calls_that_are_no_business_of_a_task_are_refused(den: &Den) {
    use Proof::{Anybody, Nobody, Root};
    let mut attacks: Vec<Attack> = [
        ("mount", libc::SYS_mount, "0, 0, 0, 0, 0", Anybody),
        ("umount2", libc::SYS_umount2, "0, 0xffff", Anybody),
        ("pivot_root", libc::SYS_pivot_root, "0, 0", Root),
        ("open_tree", libc::SYS_open_tree, "-1, 0, 0x7fffffff", Anybody),
        ("open_tree_attr", 467, "-1, 0, 0x7fffffff, 0, 0", Anybody),
        ("move_mount", libc::SYS_move_mount, "-1, 0, -1, 0, 0x7fffffff", Root),
        ("fsopen", libc::SYS_fsopen, "0, 0", Root),
        ("fsconfig", libc::SYS_fsconfig, "-1, 0, 0, 0, 0", Anybody),
        ("fsmount", libc::SYS_fsmount, "-1, 0, 0", Root),
        ("fspick", libc::SYS_fspick, "-1, 0, 0x7fffffff", Root),
        ("mount_setattr", libc::SYS_mount_setattr, "-1, 0, 0, 0, 0", Anybody),
        ("setns", libc::SYS_setns, "-1, 0", Anybody),
        ("bpf", libc::SYS_bpf, "9999, 0, 0", Root),
        ("perf_event_open", libc::SYS_perf_event_open, "1, 0, -1, -1, 0", Anybody),
        ("userfaultfd", libc::SYS_userfaultfd, "0xff0", Root),
        ("syslog", libc::SYS_syslog, "10, 0, 0", Root),
        ("init_module", libc::SYS_init_module, "0, 0, 0", Root),
        ("finit_module", libc::SYS_finit_module, "-1, 0, 0", Root),
        ("delete_module", libc::SYS_delete_module, "0, 0", Root),
        ("kexec_load", libc::SYS_kexec_load, "0, 9999, 0, 0", Root),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, "-1, -1, 0", Anybody),
        ("open_by_handle_at", libc::SYS_open_by_handle_at, "-1, 0, 0", Root),
        ("fanotify_init", libc::SYS_fanotify_init, "-1, 0", Root),
        ("acct", libc::SYS_acct, "1", Root),
        ("swapon", libc::SYS_swapon, "0, 0", Root),
        ("swapoff", libc::SYS_swapoff, "0", Root),
        ("reboot", libc::SYS_reboot, "0, 0, 0, 0", Root),
        ("quotactl", libc::SYS_quotactl, "0, 0, 0, 0", Anybody),
        ("quotactl_fd", 443, "-1, 0, 0, 0", Anybody),
        ("settimeofday", libc::SYS_settimeofday, "1, 0", Root),
        ("clock_settime", libc::SYS_clock_settime, "0, 1", Root),
        ("clock_adjtime", libc::SYS_clock_adjtime, "0, 1", Anybody),
        // It would hang up the terminal of whoever runs the test.
        ("vhangup", libc::SYS_vhangup, "0", Nobody),
        ("nfsservctl", libc::SYS_nfsservctl, "0, 0, 0", Anybody),
        ("lookup_dcookie", libc::SYS_lookup_dcookie, "0, 0, 0", Anybody),
        #[cfg(target_arch = "x86_64")]
        ("kexec_file_load", libc::SYS_kexec_file_load, "-1, -1, 0, 0, 0x7fffffff", Root),
        #[cfg(target_arch = "x86_64")]
        ("iopl", libc::SYS_iopl, "0", Anybody),
        #[cfg(target_arch = "x86_64")]
        ("ioperm", libc::SYS_ioperm, "0, 0, 0", Anybody),
        #[cfg(target_arch = "x86_64")]
        ("uselib", libc::SYS_uselib, "0", Anybody),
        #[cfg(target_arch = "x86_64")]
        ("_sysctl", libc::SYS__sysctl, "0", Anybody),
    ]
    .into_iter()
    .map(|(name, number, arguments, proof)| by_number(name, number, arguments, "EPERM", proof))
    .collect();
    attacks.extend(
        [
            ("add_key", libc::SYS_add_key, "0, 0, 0, 0, 0"),
            ("request_key", libc::SYS_request_key, "0, 0, 0, 0"),
            ("keyctl", libc::SYS_keyctl, "0, -3, 0"),
            ("io_uring_setup", libc::SYS_io_uring_setup, "0, 0"),
            ("io_uring_enter", libc::SYS_io_uring_enter, "-1, 0, 0, 0, 0, 0"),
            ("io_uring_register", libc::SYS_io_uring_register, "-1, 0, 0, 0"),
            ("clone3", libc::SYS_clone3, "0, 0"),
            ("memfd_create", libc::SYS_memfd_create, "0, 0"),
            ("memfd_secret", 447, "0xffff"),
        ]
        .map(|(name, number, arguments)| by_number(name, number, arguments, "ENOSYS", Anybody)),
    );
    den.withstands(&attacks).await;
}

pub(super) async fn no_namespace_is_made_or_entered(den: &Den) {
    let mut attacks = Vec::new();
    let kinds = [
        ("mnt", libc::CLONE_NEWNS),
        ("cgroup", libc::CLONE_NEWCGROUP),
        ("uts", libc::CLONE_NEWUTS),
        ("ipc", libc::CLONE_NEWIPC),
        ("user", libc::CLONE_NEWUSER),
        ("pid", libc::CLONE_NEWPID),
        ("net", libc::CLONE_NEWNET),
    ];
    let (unshare, clone) = (libc::SYS_unshare, libc::SYS_clone);
    for (name, flag) in kinds {
        for (by, high) in [("low", 0_i64), ("high", 1 << 32)] {
            let flag = high | i64::from(flag);
            // The kernel refuses the longer number itself, for another reason.
            let proof = if high == 0 { Proof::Root } else { Proof::Nobody };
            let attempt = format!("forked(lambda: call({unshare}, {flag}))");
            attacks.push(attack(&format!("unshare_{name}_{by}"), attempt, &["EPERM"], proof));
            let attempt = format!("call({clone}, {flag} | 17, 0, 0, 0, 0) or os._exit(0)");
            attacks.push(attack(&format!("clone_{name}_{by}"), attempt, &["EPERM"], Proof::Root));
        }
        let enter = |pid| {
            format!("forked(lambda: call({}, os.open('/proc/{pid}/ns/{name}', os.O_RDONLY), 0))", libc::SYS_setns)
        };
        attacks.push(attack(&format!("enter_{name}_of_1"), enter("1"), &["EPERM", "EACCES"], Proof::Nobody));
        // That of users cannot be entered a second time anywhere.
        let proof = if name == "user" { Proof::Nobody } else { Proof::Root };
        attacks.push(attack(&format!("enter_own_{name}"), enter("self"), &["EPERM"], proof));
    }
    attacks.push(attack("unshare_time", format!("forked(lambda: call({unshare}, 0x80))"), &["EPERM"], Proof::Root));
    den.withstands(&attacks).await;
}

pub(super) async fn sockets_of_other_kinds_are_refused(den: &Den) {
    let socket =
        |family: i32, kind: i32, protocol: i32| format!("call({}, {family}, {kind}, {protocol})", libc::SYS_socket);
    let raw = libc::SOCK_RAW;
    let high = |family: i32| format!("call({}, {family} | 1 << 32, {raw} | 1 << 32, 1)", libc::SYS_socket);
    let mut attacks = vec![
        attack("raw", socket(libc::AF_INET, raw, 1), &["EPERM"], Proof::Root),
        attack("raw_high", high(libc::AF_INET), &["EPERM"], Proof::Root),
        attack("raw_6", socket(libc::AF_INET6, raw, 58), &["EPERM"], Proof::Root),
        attack("packet_of_old", socket(libc::AF_INET, 10, 0x300), &["EPERM"], Proof::Root),
        attack("packet", socket(libc::AF_PACKET, raw, 0x300), &["EAFNOSUPPORT"], Proof::Root),
        attack("packet_pair", format!("call({}, 17, 2, 0, 0)", libc::SYS_socketpair), &["EAFNOSUPPORT"], Proof::Root),
    ];
    // Netlink but for routes (sockets' diagnoses, audit, firewalls, events), keys, TIPC, ciphers, VSOCK, XDP. A kernel
    // without one of them refuses it with the same words.
    for (name, family, protocol) in [
        ("diagnoses", 16, 4),
        ("audit", 16, 9),
        ("netfilter", 16, 12),
        ("events", 16, 15),
        ("key", 15, 2),
        ("tipc", 30, 0),
        ("ciphers", 38, 0),
        ("vsock", 40, 0),
        ("xdp", 44, 0),
    ] {
        attacks.push(attack(name, socket(family, raw, protocol), &["EAFNOSUPPORT"], Proof::Nobody));
    }
    den.withstands(&attacks).await;
    // What tasks need is there.
    for (runtime, spec) in &den.cells {
        let live = crate::support::Live::start_on(&**runtime, spec).await;
        let mut code = String::new();
        for (name, family, kind, protocol) in [
            ("unix", libc::AF_UNIX, libc::SOCK_SEQPACKET, 0),
            ("tcp", libc::AF_INET, libc::SOCK_STREAM, 0),
            ("udp", libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 17),
            ("routes", libc::AF_NETLINK, raw, 0),
        ] {
            writeln!(code, "attempt({name:?}, lambda: {})", socket(family, kind, protocol)).unwrap();
        }
        code.push_str("attempt('pair', lambda: socket.socketpair() and None)\nprint(socket.if_nameindex()[0][1])\n");
        assert_eq!(
            live.python(&code).await,
            "unix done\ntcp done\nudp done\nroutes done\npair done\nlo",
            "{}",
            den.name
        );
        live.shut().await;
    }
}

pub(super) async fn a_terminal_takes_no_input_from_programs(den: &Den) {
    let ioctl = |request: &str| {
        format!(
            "(lambda letter: call({}, os.openpty()[1], {request}, ctypes.addressof(letter)))(ctypes.c_char(b'x'))",
            libc::SYS_ioctl
        )
    };
    den.withstands(&[
        attack("type", ioctl("0x5412"), &["EPERM"], Proof::Root),
        attack("type_high", ioctl("0x5412 | 1 << 32"), &["EPERM"], Proof::Root),
        attack("console", ioctl("0x541c"), &["EPERM"], Proof::Anybody),
        attack("driver", ioctl("0x5423"), &["EPERM"], Proof::Anybody),
    ])
    .await;
}

/// The same numbers mean other calls there, so one that passes could be any.
pub(super) async fn other_call_tables_are_closed(den: &Den) {
    if cfg!(not(target_arch = "x86_64")) {
        return;
    }
    // mov eax, 20 (getpid); int 0x80; ret
    let old = "def old():
    import mmap
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))
    made = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    os._exit(0 if made == os.getpid() else -made)
def tables():
    attempt('x32', lambda: call(0x40000000 + 39))
    attempt('x32_keyctl', lambda: call(0x40000000 + 250, 0, -3, 0))
    attempt('old', lambda: forked(old))
tables()
";
    // A kernel without such programs ends this one instead, by a signal, as which the number is negative.
    for (runtime, spec) in &den.cells {
        let live = crate::support::Live::start_on(&**runtime, spec).await;
        let said = live.python(old).await;
        assert!(
            ["ENOSYS", "-11"].iter().any(|old| said == format!("x32 ENOSYS\nx32_keyctl ENOSYS\nold {old}")),
            "{said}"
        );
        live.shut().await;
    }
    let said = super::outside(old);
    assert!(said.ends_with("old done") || said.ends_with("old -11"), "{said}");
}

pub(super) async fn settings_of_the_kernel_are_closed(den: &Den) {
    // Opened to be written, and not written.
    let open = "def settings():
    def opens(path):
        try: os.close(os.open(path, os.O_WRONLY)); return True
        except OSError: return False
    found = [os.path.join(folder, name) for folder, _, names in os.walk('/proc/sys') for name in names]
    print(len(found) > 100, [path for path in found + ['/proc/sysrq-trigger', '/proc/mtrr', '/proc/kmsg', '/proc/self/../../proc/sys/kernel/core_pattern'] if opens(path)])
settings()
";
    for (runtime, spec) in &den.cells {
        let live = crate::support::Live::start_on(&**runtime, spec).await;
        assert_eq!(live.python(open).await, "True ['/proc/kmsg']", "{}", den.name);
        live.shut().await;
    }
    if crate::support::is_root() {
        let said = super::outside(open);
        assert!(said.contains("/proc/sys/kernel/core_pattern"), "{said}");
    }
}
