//! The few calls that no safe wrapper exists for, each behind a safe function.
#![expect(unsafe_code, reason = "system calls that neither nix nor rustix wraps safely")]

#[cfg(feature = "host")]
pub(crate) use host::{enter_overlay, landlock_version, received, set_idle, watch, watch_news};

#[cfg(feature = "host")]
mod host {
    use std::{
        ffi::CStr,
        io,
        os::{
            fd::{FromRawFd as _, OwnedFd, RawFd},
            unix::process::CommandExt as _,
        },
        process::Command,
    };

    use nix::{
        errno::Errno,
        fcntl::{OFlag, open},
        mount::{MsFlags, mount},
        sched::{CloneFlags, unshare},
        sys::{prctl::set_dumpable, stat::Mode},
        unistd::{mkdir, write},
    };
    use tokio::io::{Interest, unix::AsyncFd};

    /// Makes a command run in fresh user and mount namespaces in which an overlay could be mounted; where it could not, the
    /// command does not start, and starting it returns the error. `user` is the user and group that it runs as.
    pub(crate) fn enter_overlay(command: &mut Command, user: (u32, u32)) {
        let maps = [
            (c"/proc/self/setgroups", "deny".to_owned()),
            (c"/proc/self/uid_map", format!("0 {} 1", user.0)),
            (c"/proc/self/gid_map", format!("0 {} 1", user.1)),
        ];
        let enter = move || {
            set_dumpable(true)?; // or a process that has changed its user may not write its maps
            unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
            for (path, line) in &maps {
                let file = open(*path, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty())?;
                write(&file, line.as_bytes())?;
            }
            mount(None::<&CStr>, c"/", None::<&CStr>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&CStr>)?;
            mount(Some(c"none"), c"/sys", Some(c"tmpfs"), MsFlags::empty(), None::<&CStr>)?;
            for path in [c"/sys/upper", c"/sys/work", c"/sys/all"] {
                mkdir(path, Mode::S_IRWXU)?;
            }
            let options = c"lowerdir=/usr,upperdir=/sys/upper,workdir=/sys/work,userxattr";
            // As `/usr` may hold mounts, the kernel is asked about a folder that does not.
            let plain = c"lowerdir=/sys/all,upperdir=/sys/upper,workdir=/sys/work,userxattr";
            let over = |options| mount(Some(c"none"), c"/sys/all", Some(c"overlay"), MsFlags::empty(), Some(options));
            over(options).or_else(|_refused| over(plain))?;
            Ok(())
        };
        // SAFETY: the closure runs in the forked child before it executes its program, where only calls that are safe in a
        // signal handler are sound. It makes system calls on strings that exist already; it allocates nothing and takes no
        // lock. The child has one thread, as the kernel asks of a process that enters a user namespace.
        unsafe { command.pre_exec(enter) };
    }

    /// Takes ownership of descriptors that a message from another process has just brought.
    pub(crate) fn received(files: Vec<RawFd>) -> impl Iterator<Item = OwnedFd> {
        // SAFETY: the kernel has made these descriptors for this message alone, and the caller has them from nowhere else.
        files.into_iter().map(|file| unsafe { OwnedFd::from_raw_fd(file) })
    }

    /// Has a thread run only when no other wants to, or as usual again. `thread` is its number.
    pub(crate) fn set_idle(thread: u32, is_idle: bool) -> Result<(), Errno> {
        let thread = libc::pid_t::try_from(thread).map_err(|_too_large| Errno::ESRCH)?;
        let policy = if is_idle { libc::SCHED_IDLE } else { libc::SCHED_OTHER };
        // SAFETY: all zeroes is a valid `sched_param`, which holds numbers only, and means the one priority that both policies
        // have. It lives until the call returns, and the kernel only reads it.
        let done = unsafe {
            let param: libc::sched_param = std::mem::zeroed();
            libc::sched_setscheduler(thread, policy, &raw const param)
        };
        Errno::result(done).map(drop)
    }

    /// Registers a process handle with the runtime's reactor. It is readable once the process has ended.
    pub(crate) fn watch(handle: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
        // SAFETY: an `OwnedFd` is open, names one file description for as long as it lives, and always returns the same
        // number; the `AsyncFd` owns it and nothing here swaps it.
        Ok(unsafe { AsyncFd::register_with_interest(handle, Interest::READABLE) }?)
    }

    /// Registers a file of the kernel's that tells its changes, as those of control groups do, with the runtime's reactor.
    pub(crate) fn watch_news(file: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
        // SAFETY: as above.
        Ok(unsafe { AsyncFd::register_with_interest(file, Interest::PRIORITY) }?)
    }

    /// Asks for the version instead of a set of rules, as in `linux/landlock.h`.
    const LANDLOCK_CREATE_RULESET_VERSION: libc::c_uint = 1;

    /// Returns the version of the kernel's Landlock.
    pub(crate) fn landlock_version() -> io::Result<u32> {
        let (no_attributes, size) = (std::ptr::null::<libc::c_void>(), 0_usize);
        // SAFETY: with this flag the kernel reads no attributes and makes nothing; it returns a number.
        let version = unsafe {
            libc::syscall(libc::SYS_landlock_create_ruleset, no_attributes, size, LANDLOCK_CREATE_RULESET_VERSION)
        };
        u32::try_from(version).map_err(|_failed| io::Error::last_os_error())
    }
}

/// Waits as `poll` does, and goes on when a signal that is another's interrupts it: where tests share a process, whoever starts
/// programs in it has their ends told by signals.
#[cfg(all(test, feature = "host"))]
pub(crate) fn poll_patiently(fds: &mut [nix::poll::PollFd<'_>], millis: u16) -> i32 {
    loop {
        match nix::poll::poll(fds, millis) {
            Err(nix::errno::Errno::EINTR) => {}
            polled => return polled.expect("descriptors that can be waited for"),
        }
    }
}

#[cfg(feature = "init")]
pub(crate) use guest::{
    Fork, Seal, close_all_but, filter_calls, fork, keep_to_itself, reset_signals, seal_mount, set_env, up_loopback,
};

#[cfg(feature = "init")]
mod guest {
    use std::{
        ffi::CString,
        mem,
        os::{
            fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
            unix::ffi::OsStrExt,
        },
        path::Path,
        ptr,
    };

    use nix::{
        errno::Errno,
        sys::signal::SigSet,
        unistd::{ForkResult, Pid},
    };

    /// Which of the two processes a [`fork`] returned in.
    pub(crate) enum Fork {
        /// The old process, with the new one's number.
        Parent(Pid),
        /// The new process.
        Child,
    }

    /// Forks. The caller has just entered a user namespace, which the kernel allows to a process of one thread only.
    pub(crate) fn fork() -> Result<Fork, Errno> {
        // SAFETY: in a process of one thread a fork copies everything that exists; no lock can be held by a thread
        // that the child lacks.
        match unsafe { nix::unistd::fork() }? {
            ForkResult::Parent { child } => Ok(Fork::Parent(child)),
            ForkResult::Child => Ok(Fork::Child),
        }
    }

    /// Closes every file descriptor above standard error except `keep`.
    pub(crate) fn close_all_but(keep: BorrowedFd<'_>) -> Result<(), Errno> {
        let keep = keep.as_raw_fd().unsigned_abs();
        for (first, last) in [(3, keep.saturating_sub(1)), (keep.max(2) + 1, u32::MAX)] {
            if first <= last {
                // SAFETY: the guest calls this before it opens anything, so that no owner in this process loses its
                // descriptor; what is closed was inherited by mistake. The call takes no pointers.
                Errno::result(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) })?;
            }
        }
        Ok(())
    }

    /// As `struct mount_attr` of `linux/mount.h`.
    #[repr(C)]
    struct MountAttr {
        set: u64,
        clear: u64,
        propagation: u64,
        userns_fd: u64,
    }

    const MOUNT_ATTR_RDONLY: u64 = 0x1;
    const MOUNT_ATTR_NOSUID: u64 = 0x2;
    const MOUNT_ATTR_NODEV: u64 = 0x4;
    const AT_RECURSIVE: libc::c_uint = 0x8000;

    /// What a mount is denied, beside set-id programs.
    #[derive(Clone, Copy)]
    pub(crate) enum Seal {
        /// Nothing.
        Writable,
        /// Writing.
        ReadOnly,
        /// Writing, and what its device nodes stand for.
        Files,
    }

    /// Denies set-id programs and what `seal` says, on a mount and on every mount below it.
    ///
    /// A plain remount would reach the top mount only, and would have to repeat the flags that the kernel has locked.
    pub(crate) fn seal_mount(target: &Path, seal: Seal) -> Result<(), Errno> {
        let path = CString::new(target.as_os_str().as_bytes()).map_err(|_nul| Errno::EINVAL)?;
        let denied = match seal {
            Seal::Writable => 0,
            Seal::ReadOnly => MOUNT_ATTR_RDONLY,
            Seal::Files => MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV,
        };
        let attr = MountAttr { set: MOUNT_ATTR_NOSUID | denied, clear: 0, propagation: 0, userns_fd: 0 };
        // SAFETY: `path` and `attr` live until the call returns; the kernel reads a NUL-terminated string from the one and
        // exactly the stated size from the other, whose layout is that of the kernel's structure.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                libc::AT_FDCWD,
                path.as_ptr(),
                AT_RECURSIVE,
                &raw const attr,
                mem::size_of::<MountAttr>(),
            )
        };
        Errno::result(done).map(drop)
    }

    /// `IFF_UP` as wide as an `ifreq` holds it.
    const UP: libc::c_short = 1;

    /// Brings the loopback interface of the current network namespace up.
    pub(crate) fn up_loopback() -> Result<(), Errno> {
        // SAFETY: no pointers. The descriptor is fresh, so it has no other owner.
        let socket = unsafe {
            let raw = Errno::result(libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0))?;
            OwnedFd::from_raw_fd(raw)
        };
        // SAFETY: all zeroes is a valid `ifreq`: it holds numbers and bytes only.
        let mut request: libc::ifreq = unsafe { mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
            *to = from.cast_signed();
        }
        request.ifr_ifru.ifru_flags = UP;
        // SAFETY: SIOCSIFFLAGS reads one `ifreq`, which lives until the call returns and whose flags are set.
        Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) }).map(drop)
    }

    /// Puts a filter on system calls, in this process and in all that it will start, for good.
    ///
    /// The caller has given up new privileges, without which the kernel takes no filter.
    pub(crate) fn filter_calls(filter: &mut [libc::sock_filter]) -> Result<(), Errno> {
        let len = libc::c_ushort::try_from(filter.len()).map_err(|_too_long| Errno::EINVAL)?;
        let program = libc::sock_fprog { len, filter: filter.as_mut_ptr() };
        // SAFETY: `program` points at `len` instructions in `filter`, which lives until the call returns; the kernel checks
        // and copies them, and writes nothing.
        Errno::result(unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) })
            .map(drop)
    }

    /// As `struct landlock_ruleset_attr` of `linux/landlock.h`.
    #[repr(C)]
    struct RulesetAttr {
        files: u64,
        network: u64,
        scoped: u64,
    }

    const LANDLOCK_CREATE_RULESET_VERSION: libc::c_uint = 1;
    /// Abstract Unix sockets, and signals.
    const LANDLOCK_SCOPES: u64 = 0b11;
    /// The first version of Landlock that knows those.
    const SCOPING_VERSION: libc::c_long = 6;

    /// Makes this process, and all that it will start, unable to reach abstract sockets and to signal processes of others, for
    /// good, where the kernel knows how (since 6.12, with Landlock on).
    ///
    /// The caller has given up new privileges, without which the kernel refuses.
    pub(crate) fn keep_to_itself() -> Result<(), Errno> {
        let attr = RulesetAttr { files: 0, network: 0, scoped: LANDLOCK_SCOPES };
        let len = mem::size_of::<RulesetAttr>();
        // SAFETY: asked for its version, the call takes no pointer.
        let version = unsafe {
            libc::syscall(
                libc::SYS_landlock_create_ruleset,
                ptr::null::<RulesetAttr>(),
                0_usize,
                LANDLOCK_CREATE_RULESET_VERSION,
            )
        };
        if version < SCOPING_VERSION {
            return Ok(());
        }
        // SAFETY: the kernel reads the stated size from `attr`, which lives until the call returns and whose layout is that of
        // the kernel's structure. The descriptor is fresh, so it has no other owner.
        let rules = unsafe {
            let raw = Errno::result(libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attr, len, 0))?;
            OwnedFd::from_raw_fd(RawFd::try_from(raw).map_err(|_no_descriptor| Errno::EBADF)?)
        };
        // SAFETY: no pointers.
        Errno::result(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) }).map(drop)
    }

    /// Gives every signal its default action and unblocks all. A host may have ignored some (as `nohup` does), and nobody
    /// inside could undo that. SIGPIPE stays ignored: the guest wants the error instead.
    pub(crate) fn reset_signals() -> Result<(), Errno> {
        for number in (1..=libc::SIGRTMAX()).filter(|number| *number != libc::SIGPIPE) {
            // Refused for the two that have no other action and for those that the C library keeps to itself.
            // SAFETY: the default action runs no code of this program.
            unsafe { libc::signal(number, libc::SIG_DFL) };
        }
        SigSet::empty().thread_set_mask()
    }

    /// Replaces this process's environment, which everything inside inherits.
    pub(crate) fn set_env<'a>(variables: impl Iterator<Item = (&'a str, &'a str)>) {
        let old: Vec<_> = std::env::vars_os().map(|(name, _)| name).collect();
        #[expect(
            clippy::disallowed_methods,
            reason = "process 1 has one thread as yet, and this is its environment's start"
        )]
        // SAFETY: the process has one thread (see `fork`), so nobody reads the environment meanwhile. Names with '=' or
        // NUL, which would panic, are refused with the set-up.
        unsafe {
            for name in old {
                std::env::remove_var(name);
            }
            for (name, value) in variables {
                std::env::set_var(name, value);
            }
        }
    }
}
