//! Which system calls a task does not get, and why.

use nix::errno::Errno;

use super::seccomp::{Rule, Test, Verdict};

/// Calls that fail for want of permission. Nothing that runs as an ordinary user is allowed them anyway, or it is no business
/// of a task's; but each of them leads to code of the kernel's that has been a way out before.
pub(super) const FORBIDDEN: &[libc::c_long] = &[
    // Mounts, by the old calls and the new.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_open_tree,
    OPEN_TREE_ATTR,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    // Other namespaces.
    libc::SYS_setns,
    // Programs in the kernel, and a look at it.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_syslog,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    KEXEC_FILE_LOAD,
    // Files of other processes, and files by number, past all folders.
    libc::SYS_pidfd_getfd,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    // The machine as a whole.
    libc::SYS_acct,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_reboot,
    libc::SYS_quotactl,
    QUOTACTL_FD,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_vhangup,
    libc::SYS_nfsservctl,
    libc::SYS_lookup_dcookie,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_uselib,
    #[cfg(target_arch = "x86_64")]
    libc::SYS__sysctl,
];

/// Calls that do not exist for tasks, so that programs do without them or in another way.
pub(super) const MISSING: &[libc::c_long] = &[
    // Keyrings know no namespace but that of users: the session keyring of whoever started the host's program would come along
    // into every sandbox, to be read, filled and revoked there.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // It makes other calls where no filter sees them.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Its flags are in memory, where no filter sees them. Libraries fall back to clone, whose flags are in a register.
    libc::SYS_clone3,
    // Memory that belongs to no process while nobody maps it, and so counts for nobody.
    libc::SYS_memfd_create,
    MEMFD_SECRET,
];

/// Calls that a fake root of one id only seems to make: there is nobody to give a file to, nor to become. The
/// post-install scripts of packages make them and need no more than that they succeed. Making devices
/// is not pretended: whoever makes one goes on to change it, and a refusal is what such tools know.
pub(super) const PRETENDED: &[libc::c_long] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_setfsgid,
    libc::SYS_setfsuid,
    libc::SYS_setgid,
    libc::SYS_setgroups,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_setuid,
];

const KEXEC_FILE_LOAD: libc::c_long = if cfg!(target_arch = "x86_64") { 320 } else { 294 };

// Numbers that the C library's headers do not have everywhere. Calls of their age have one number in every table.
const QUOTACTL_FD: libc::c_long = 443;
const MEMFD_SECRET: libc::c_long = 447;
const OPEN_TREE_ATTR: libc::c_long = 467;

/// Flags of `clone` and `unshare` for new namespaces: of mounts, control groups, names, IPC, users, processes, networks.
const NAMESPACES: u32 = 0x0002_0000 | 0x0200_0000 | 0x0400_0000 | 0x0800_0000 | 0x1000_0000 | 0x2000_0000 | 0x4000_0000;

/// The same for `unshare` alone: for `clone` this is part of a signal's number.
const CLOCKS: u32 = 0x80;

// Requests to a terminal: to put words into its input, as if they were typed; to do as much on a console; and to have another
// driver of the kernel's work it, which may be a rarely used one.
const TIOCSTI: u32 = 0x5412;
const TIOCLINUX: u32 = 0x541c;
const TIOCSETD: u32 = 0x5423;

const UNIX: u32 = libc::AF_UNIX.unsigned_abs();
const INET: u32 = libc::AF_INET.unsigned_abs();
const INET6: u32 = libc::AF_INET6.unsigned_abs();
const NETLINK: u32 = libc::AF_NETLINK.unsigned_abs();
const ROUTE: u32 = libc::NETLINK_ROUTE.unsigned_abs();
const STREAM: u32 = libc::SOCK_STREAM.unsigned_abs();
const DATAGRAM: u32 = libc::SOCK_DGRAM.unsigned_abs();

const TCP: u32 = libc::IPPROTO_TCP.unsigned_abs();
const UDP: u32 = libc::IPPROTO_UDP.unsigned_abs();
const ECHO4: u32 = libc::IPPROTO_ICMP.unsigned_abs();
const ECHO6: u32 = libc::IPPROTO_ICMPV6.unsigned_abs();

/// The part of a socket's kind that is no flag.
const KIND: u32 = 0xf;

const NOT_ALLOWED: Verdict = Verdict::Refused(Errno::EPERM);

/// What the two families of the internet are for: TCP, UDP and echoes, by their numbers or by 0, which means the usual one of a kind.
/// All other protocols are rarely used code of the kernel, which it may even load when it is asked for one.
const PROTOCOLS: [(u32, u32, u32); 10] = [
    (INET, STREAM, 0),
    (INET, STREAM, TCP),
    (INET, DATAGRAM, 0),
    (INET, DATAGRAM, UDP),
    (INET, DATAGRAM, ECHO4),
    (INET6, STREAM, 0),
    (INET6, STREAM, TCP),
    (INET6, DATAGRAM, 0),
    (INET6, DATAGRAM, UDP),
    (INET6, DATAGRAM, ECHO6),
];

const fn tests_of_protocols() -> [[Test; 3]; 10] {
    let mut tests = [[Test::is(0, 0); 3]; 10];
    let mut idx = 0;
    while idx < PROTOCOLS.len() {
        let (family, kind, protocol) = PROTOCOLS[idx];
        tests[idx] = [Test::is(0, family), Test::masked(1, KIND, kind), Test::is(2, protocol)];
        idx += 1;
    }
    tests
}

static TESTS_OF_PROTOCOLS: [[Test; 3]; 10] = tests_of_protocols();

/// Streams and datagrams of the internet (its raw packets are not for tasks, nor is the kind that means any packet of the link),
/// sockets on this machine, and questions about routes, by which libraries learn what addresses there are.
pub(super) fn sockets() -> Vec<Rule> {
    const UNIXES: &[Test] = &[Test::is(0, UNIX)];
    const ROUTES: &[Test] = &[Test::is(0, NETLINK), Test::is(2, ROUTE)];
    const INETS: &[Test] = &[Test::is(0, INET)];
    const INETS6: &[Test] = &[Test::is(0, INET6)];
    let mut rules = Vec::new();
    for call in [libc::SYS_socket, libc::SYS_socketpair] {
        let rule = |tests, verdict| Rule { call, tests, verdict };
        rules.push(rule(UNIXES, Verdict::Made));
        rules.extend(TESTS_OF_PROTOCOLS.iter().map(|tests| rule(tests, Verdict::Made)));
        rules.extend([
            rule(ROUTES, Verdict::Made),
            rule(INETS, NOT_ALLOWED),
            rule(INETS6, NOT_ALLOWED),
            rule(&[], Verdict::Refused(Errno::EAFNOSUPPORT)),
        ]);
    }
    rules
}

/// Calls of which the arguments decide.
pub(super) const BY_ARGUMENT: &[&[Rule]] = &[
    &[
        Rule { call: libc::SYS_ioctl, tests: &[Test::is(1, TIOCSTI)], verdict: NOT_ALLOWED },
        Rule { call: libc::SYS_ioctl, tests: &[Test::is(1, TIOCLINUX)], verdict: NOT_ALLOWED },
        Rule { call: libc::SYS_ioctl, tests: &[Test::is(1, TIOCSETD)], verdict: NOT_ALLOWED },
        // The kernel takes these flags as 32 bits for clone, and refuses longer ones for unshare.
        Rule { call: libc::SYS_clone, tests: &[Test::any_of(0, NAMESPACES)], verdict: NOT_ALLOWED },
        Rule { call: libc::SYS_unshare, tests: &[Test::any_of(0, NAMESPACES | CLOCKS)], verdict: NOT_ALLOWED },
    ],
    OF_OTHERS,
];

/// What changes another process, and so could cripple the guest, whose user is the tasks' own: limits, which a process otherwise
/// changes for itself, by the number 0; priorities; and for process 1 alone, because libraries name their own threads, the choice of
/// processors.
const OF_OTHERS: &[Rule] = &[
    Rule { call: libc::SYS_prlimit64, tests: &[Test::is(0, 0)], verdict: Verdict::Made },
    Rule { call: libc::SYS_prlimit64, tests: &[], verdict: NOT_ALLOWED },
    Rule { call: libc::SYS_setpriority, tests: &[Test::is(1, 0)], verdict: Verdict::Made },
    Rule { call: libc::SYS_setpriority, tests: &[], verdict: NOT_ALLOWED },
    Rule { call: libc::SYS_ioprio_set, tests: &[Test::is(1, 0)], verdict: Verdict::Made },
    Rule { call: libc::SYS_ioprio_set, tests: &[], verdict: NOT_ALLOWED },
    Rule { call: libc::SYS_sched_setattr, tests: &[Test::is(0, 0)], verdict: Verdict::Made },
    Rule { call: libc::SYS_sched_setattr, tests: &[], verdict: NOT_ALLOWED },
    Rule { call: libc::SYS_sched_setaffinity, tests: &[Test::is(0, GUEST)], verdict: NOT_ALLOWED },
    Rule { call: libc::SYS_sched_setparam, tests: &[Test::is(0, GUEST)], verdict: NOT_ALLOWED },
    Rule { call: libc::SYS_sched_setscheduler, tests: &[Test::is(0, 0)], verdict: Verdict::Made },
    Rule { call: libc::SYS_sched_setscheduler, tests: &[Test::is(0, GUEST)], verdict: NOT_ALLOWED },
    Rule { call: libc::SYS_sched_setscheduler, tests: &[Test::is(1, IDLE)], verdict: NOT_ALLOWED },
];

/// Process 1.
const GUEST: u32 = 1;

const IDLE: u32 = libc::SCHED_IDLE.unsigned_abs();

/// The largest shared memory of System V, and the most semaphores in a set, where the kernel could not be told what all of them
/// may take: it allows 4096 and 32000 of them. Databases ask for a page, and sets of 17.
const SHARED_BYTES: u32 = 4096;
const SEMAPHORES: u32 = 32;

const MISSING_HERE: Verdict = Verdict::Refused(Errno::ENOSYS);

/// What bounds the objects of System V then.
pub(super) const UNLIMITED_IPC: &[Rule] = &[
    // A size is 64 bits long.
    Rule { call: libc::SYS_shmget, tests: &[Test::is_long(1)], verdict: MISSING_HERE },
    Rule { call: libc::SYS_shmget, tests: &[Test::above(1, SHARED_BYTES)], verdict: MISSING_HERE },
    Rule { call: libc::SYS_semget, tests: &[Test::above(1, SEMAPHORES)], verdict: MISSING_HERE },
    Rule { call: libc::SYS_msgget, tests: &[], verdict: MISSING_HERE },
];
