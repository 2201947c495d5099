//! The filter of system calls: which rules make a program for the kernel, and what each call of a task comes to.
//!
//! Rules are looked at in their order, and the first one that fits decides; a call that none fits is made. Which calls those
//! are about is said in [`calls`](super::calls).

use nix::errno::Errno;

use super::calls;
use crate::sys;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the filter of system calls has to be told this processor's number: see AUDIT_ARCH_* in linux/audit.h");

/// The kernel's number for this program's own system call table, as in `linux/audit.h`.
const ARCH: u32 = if cfg!(target_arch = "x86_64") { 0xc000_003e } else { 0xc000_00b7 };

/// Numbers of x86-64 from here on are those of its x32 table.
const X32: u32 = 0x4000_0000;

/// Where things are in `struct seccomp_data`: the number, the table, the arguments of 8 bytes each, the low half first.
const NUMBER: u32 = 0;
const TABLE: u32 = 4;
const ARGUMENTS: u32 = 16;

/// What comes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is made.
    Made,
    /// It is not made, and succeeds.
    Pretended,
    /// It is not made, and fails.
    Refused(Errno),
}

/// A test of one half of an argument.
///
/// The kernel drops the high half of an argument that it takes for an `int`, and so must a test of one: else a bit up there
/// would be a way round it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Test {
    half: u32,
    how: How,
}

#[derive(Clone, Copy, Debug)]
enum How {
    /// At least one of these bits is set.
    AnyOf(u32),
    /// It is more than this.
    Above(u32),
    /// What the mask leaves of it is this.
    Is { mask: u32, value: u32 },
}

impl Test {
    /// That the low half of an argument, counted from 0, has one of these bits.
    pub(super) const fn any_of(argument: u32, bits: u32) -> Self {
        Self { half: ARGUMENTS + 8 * argument, how: How::AnyOf(bits) }
    }

    /// That the low half is more than this.
    pub(super) const fn above(argument: u32, value: u32) -> Self {
        Self { half: ARGUMENTS + 8 * argument, how: How::Above(value) }
    }

    /// That the low half is this.
    pub(super) const fn is(argument: u32, value: u32) -> Self {
        Self::masked(argument, u32::MAX, value)
    }

    /// That what the mask leaves of the low half is this.
    pub(super) const fn masked(argument: u32, mask: u32, value: u32) -> Self {
        Self { half: ARGUMENTS + 8 * argument, how: How::Is { mask, value } }
    }

    /// That the high half is not zero.
    pub(super) const fn is_long(argument: u32) -> Self {
        Self { half: ARGUMENTS + 8 * argument + 4, how: How::AnyOf(u32::MAX) }
    }
}

/// What comes of a call for which every test holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    pub(super) call: libc::c_long,
    pub(super) tests: &'static [Test],
    pub(super) verdict: Verdict,
}

/// What a filter depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    /// Whether calls are pretended that a fake root of one id cannot make.
    pub(super) pretends: bool,
    /// Whether the kernel limits what System V objects take.
    pub(super) ipc_is_limited: bool,
}

/// Puts the filter on system calls, in this process and in all that it will start, for good.
///
/// The caller has given up new privileges, without which the kernel takes no filter.
pub(super) fn filter(kind: Kind) -> Result<(), Errno> {
    sys::filter_calls(&mut program(&rules(kind)))
}

fn rules(kind: Kind) -> Vec<Rule> {
    let plain =
        |list: &'static [libc::c_long], verdict| list.iter().map(move |call| Rule { call: *call, tests: &[], verdict });
    let ipc = if kind.ipc_is_limited { &[] } else { calls::UNLIMITED_IPC };
    let pretended = if kind.pretends { calls::PRETENDED } else { &[] };
    // First those that look at arguments. Of all others the kernel knows beforehand what comes of them.
    let mut rules: Vec<Rule> = [&calls::BY_ARGUMENT.concat(), calls::sockets().as_slice(), ipc].concat();
    rules.extend(plain(calls::FORBIDDEN, Verdict::Refused(Errno::EPERM)));
    rules.extend(plain(calls::MISSING, Verdict::Refused(Errno::ENOSYS)));
    rules.extend(plain(pretended, Verdict::Pretended));
    rules
}

fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    // Codes are below 0x100.
    libc::sock_filter { code: u16::try_from(code).unwrap_or_default(), jt, jf, k }
}

fn load(offset: u32) -> libc::sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0)
}

/// Goes on with the next instruction where the comparison holds, and passes over as many as `skip` where it does not.
fn compare(how: u32, k: u32, skip: usize) -> libc::sock_filter {
    // A rule has a few tests of a few instructions.
    instruction(libc::BPF_JMP | how | libc::BPF_K, k, 0, u8::try_from(skip).unwrap_or_default())
}

fn answer(verdict: Verdict) -> libc::sock_filter {
    let action = match verdict {
        Verdict::Made => libc::SECCOMP_RET_ALLOW,
        Verdict::Pretended => libc::SECCOMP_RET_ERRNO,
        Verdict::Refused(errno) => libc::SECCOMP_RET_ERRNO | (errno as i32).unsigned_abs(),
    };
    instruction(libc::BPF_RET | libc::BPF_K, action, 0, 0)
}

/// The filter's program.
///
/// A number means another call in another table (32-bit programs, x32), so every call by one of those is refused.
fn program(rules: &[Rule]) -> Vec<libc::sock_filter> {
    let foreign = answer(Verdict::Refused(Errno::ENOSYS));
    let is_own = instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, ARCH, 1, 0);
    let mut program = vec![load(TABLE), is_own, foreign, load(NUMBER)];
    if cfg!(target_arch = "x86_64") {
        program.extend([compare(libc::BPF_JGE, X32, 1), foreign]);
    }
    for rule in rules {
        let body = body(rule);
        let number = u32::try_from(rule.call).unwrap_or(u32::MAX); // no call has that one
        program.push(compare(libc::BPF_JEQ, number, body.len()));
        program.extend(body);
    }
    program.push(answer(Verdict::Made));
    program
}

/// What follows the comparison of the number. When a test fails, the number is loaded again for the next rule.
fn body(rule: &Rule) -> Vec<libc::sock_filter> {
    let mut body = vec![answer(rule.verdict)];
    if !rule.tests.is_empty() {
        body.push(load(NUMBER));
    }
    for test in rule.tests.iter().rev() {
        let skip = body.len() - 1;
        let mut head = vec![load(test.half)];
        match test.how {
            How::AnyOf(bits) => head.push(compare(libc::BPF_JSET, bits, skip)),
            How::Above(value) => head.push(compare(libc::BPF_JGT, value, skip)),
            How::Is { mask, value } => {
                if mask != u32::MAX {
                    head.push(instruction(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, mask, 0, 0));
                }
                head.push(compare(libc::BPF_JEQ, value, skip));
            }
        }
        body.splice(0..0, head);
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Kind = Kind { pretends: false, ipc_is_limited: true };

    /// Runs a filter as the kernel does.
    fn run(program: &[libc::sock_filter], table: u32, number: u32, arguments: [u64; 3]) -> u32 {
        let halves = arguments.iter().flat_map(|long| [*long & 0xffff_ffff, *long >> 32]);
        let halves = halves.map(|half| u32::try_from(half).unwrap());
        let mut data = vec![number, table, 0, 0];
        data.extend(halves);
        let (mut at, mut word) = (0, 0);
        loop {
            let one = program[at];
            at += 1;
            let mut jump = |holds: bool| at += usize::from(if holds { one.jt } else { one.jf });
            match u32::from(one.code) {
                0x20 => word = data[one.k as usize / 4],
                0x54 => word &= one.k,
                0x15 => jump(word == one.k),
                0x25 => jump(word > one.k),
                0x35 => jump(word >= one.k),
                0x45 => jump(word & one.k != 0),
                0x06 => return one.k,
                code => panic!("instruction {code:#x}"),
            }
        }
    }

    fn verdict(kind: Kind, call: libc::c_long, arguments: [u64; 3]) -> Result<(), i32> {
        let action = run(&program(&rules(kind)), ARCH, u32::try_from(call).unwrap(), arguments);
        match action & libc::SECCOMP_RET_ACTION_FULL {
            libc::SECCOMP_RET_ALLOW => Ok(()),
            _ => Err(i32::try_from(action & libc::SECCOMP_RET_DATA).unwrap()),
        }
    }

    #[test]
    fn calls_are_refused_made_or_pretended() {
        for (call, expected) in [
            (libc::SYS_mount, Err(libc::EPERM)),
            (libc::SYS_bpf, Err(libc::EPERM)),
            (libc::SYS_keyctl, Err(libc::ENOSYS)),
            (libc::SYS_memfd_create, Err(libc::ENOSYS)),
            (libc::SYS_clone3, Err(libc::ENOSYS)),
            (libc::SYS_openat, Ok(())),
            (libc::SYS_fchownat, Ok(())),
        ] {
            assert_eq!(verdict(PLAIN, call, [0; 3]), expected, "{call}");
        }
        assert_eq!(verdict(Kind { pretends: true, ..PLAIN }, libc::SYS_fchownat, [0; 3]), Err(0));
    }

    #[test]
    fn another_table_is_closed() {
        let program = program(&rules(PLAIN));
        let refused = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
        let getpid = u32::try_from(libc::SYS_getpid).unwrap();
        assert_eq!(run(&program, ARCH, getpid, [0; 3]), libc::SECCOMP_RET_ALLOW);
        assert_eq!(run(&program, 0x4000_0003, getpid, [0; 3]), refused);
        if cfg!(target_arch = "x86_64") {
            assert_eq!(run(&program, ARCH, X32 + getpid, [0; 3]), refused);
            assert_eq!(run(&program, ARCH, u32::MAX, [0; 3]), refused);
        }
    }

    #[test]
    fn namespaces_are_refused_and_processes_made() {
        // The signal that a child ends with.
        const CHILD: u64 = 0x11;
        let thread = 0x003d_0f00;
        for flags in [CHILD, thread, thread | CHILD] {
            assert_eq!(verdict(PLAIN, libc::SYS_clone, [flags, 0, 0]), Ok(()), "{flags:#x}");
            assert_eq!(verdict(PLAIN, libc::SYS_unshare, [libc::CLONE_FILES as u64, 0, 0]), Ok(()));
        }
        for space in [0x2_0000, 0x200_0000, 0x400_0000, 0x800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000] {
            for high in [0, 1 << 32] {
                assert_eq!(
                    verdict(PLAIN, libc::SYS_clone, [high | space | CHILD, 0, 0]),
                    Err(libc::EPERM),
                    "{space:#x}"
                );
                assert_eq!(verdict(PLAIN, libc::SYS_unshare, [high | space, 0, 0]), Err(libc::EPERM), "{space:#x}");
            }
        }
        // That of clocks is another flag of clone's: the signal that a child ends with.
        assert_eq!(verdict(PLAIN, libc::SYS_unshare, [0x80, 0, 0]), Err(libc::EPERM));
    }

    #[test]
    fn sockets_are_those_of_the_machine_and_of_the_internet() {
        use libc::{AF_INET, AF_INET6, AF_NETLINK, AF_PACKET, AF_UNIX, AF_VSOCK, SOCK_DGRAM, SOCK_RAW, SOCK_STREAM};
        let cloexec = libc::SOCK_CLOEXEC;
        for (family, kind, protocol, expected) in [
            (AF_UNIX, libc::SOCK_SEQPACKET | cloexec, 0, Ok(())),
            (AF_UNIX, SOCK_RAW, 0, Ok(())),
            (AF_INET, SOCK_STREAM | cloexec, 0, Ok(())),
            (AF_INET6, SOCK_DGRAM, 58, Ok(())),
            (AF_INET, SOCK_STREAM, libc::IPPROTO_TCP, Ok(())),
            (AF_INET, SOCK_DGRAM, libc::IPPROTO_UDP, Ok(())),
            (AF_INET, SOCK_STREAM, libc::IPPROTO_MPTCP, Err(libc::EPERM)),
            (AF_INET6, SOCK_STREAM, libc::IPPROTO_SCTP, Err(libc::EPERM)),
            (AF_INET, SOCK_DGRAM, libc::IPPROTO_UDPLITE, Err(libc::EPERM)),
            (AF_INET, SOCK_DGRAM, 115, Err(libc::EPERM)),
            (AF_INET, SOCK_STREAM, 256, Err(libc::EPERM)),
            (AF_INET, SOCK_RAW | cloexec, 1, Err(libc::EPERM)),
            (AF_INET6, SOCK_RAW, 0, Err(libc::EPERM)),
            (AF_INET, 10, 0, Err(libc::EPERM)), // which is another way to write AF_PACKET
            (AF_NETLINK, SOCK_RAW, 0, Ok(())),
            (AF_NETLINK, SOCK_RAW, 9, Err(libc::EAFNOSUPPORT)),
            (AF_PACKET, SOCK_DGRAM, 0, Err(libc::EAFNOSUPPORT)),
            (AF_VSOCK, SOCK_STREAM, 0, Err(libc::EAFNOSUPPORT)),
            (38, libc::SOCK_SEQPACKET, 0, Err(libc::EAFNOSUPPORT)),
        ] {
            for high in [0, 1 << 32] {
                let arguments = [family, kind, protocol].map(|low| high | u64::from(low.unsigned_abs()));
                for call in [libc::SYS_socket, libc::SYS_socketpair] {
                    assert_eq!(verdict(PLAIN, call, arguments), expected, "{family} {kind:#x} {protocol}");
                }
            }
        }
    }

    #[test]
    fn nobody_changes_the_guest() {
        let idle = u64::from(libc::SCHED_IDLE.unsigned_abs());
        for high in [0, 1 << 32] {
            for (call, arguments, expected) in [
                (libc::SYS_prlimit64, [high, 7, 1], Ok(())),
                (libc::SYS_prlimit64, [high | 1, 7, 1], Err(libc::EPERM)),
                (libc::SYS_prlimit64, [high | 5, 7, 1], Err(libc::EPERM)),
                (libc::SYS_setpriority, [0, high, 19], Ok(())),
                (libc::SYS_setpriority, [0, high | 1, 19], Err(libc::EPERM)),
                (libc::SYS_sched_setaffinity, [high | 1, 8, 1], Err(libc::EPERM)),
                (libc::SYS_sched_setaffinity, [high | 5, 8, 1], Ok(())),
                (libc::SYS_sched_setscheduler, [high, idle, 1], Ok(())),
                (libc::SYS_sched_setscheduler, [high | 1, 0, 1], Err(libc::EPERM)),
                (libc::SYS_sched_setscheduler, [high | 5, idle, 1], Err(libc::EPERM)),
                (libc::SYS_sched_setscheduler, [high | 5, 0, 1], Ok(())),
            ] {
                assert_eq!(verdict(PLAIN, call, arguments), expected, "{call} {arguments:?}");
            }
        }
    }

    #[test]
    fn a_terminal_takes_no_input_from_programs() {
        for high in [0, 1 << 32] {
            assert_eq!(verdict(PLAIN, libc::SYS_ioctl, [0, high | 0x5412, 0]), Err(libc::EPERM));
            assert_eq!(verdict(PLAIN, libc::SYS_ioctl, [0, high | 0x5413, 0]), Ok(()));
        }
    }

    #[test]
    fn objects_that_the_kernel_does_not_limit_are_small() {
        let unlimited = Kind { ipc_is_limited: false, ..PLAIN };
        for (call, size, expected) in [
            (libc::SYS_shmget, 4096, Ok(())),
            (libc::SYS_shmget, 4097, Err(libc::ENOSYS)),
            (libc::SYS_shmget, 1 << 32, Err(libc::ENOSYS)),
            (libc::SYS_semget, 17, Ok(())),
            (libc::SYS_semget, 1000, Err(libc::ENOSYS)),
            (libc::SYS_msgget, 0, Err(libc::ENOSYS)),
        ] {
            assert_eq!(verdict(unlimited, call, [0, size, 0]), expected, "{call} {size}");
            assert_eq!(verdict(PLAIN, call, [0, size, 0]), Ok(()), "{call} {size}");
        }
    }
}
