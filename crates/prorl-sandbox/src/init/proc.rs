//! The `/proc` of a sandbox: that of its pid namespace, and what the kernel is told there before it is closed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use nix::mount::{self, MsFlags};
use prorl_core::hello::StartFailure;

use super::{
    At, ipc, rlimits,
    root::{HOST, NO_PROGRAMS, bind_mount, inside, tmpfs},
};
use crate::{
    setup::{Setup, step},
    sys::{self, Seal},
};

/// Parts of `/proc` that nobody inside may write, whatever its user.
const PROC_READ_ONLY: &[&str] = &["bus", "fs", "irq", "sys", "sysrq-trigger"];

/// Files of `/proc` that tell about the whole machine, or show its memory, and that nobody inside needs.
const PROC_HIDDEN: &[&str] = &[
    "cmdline",
    "config.gz",
    "interrupts",
    "iomem",
    "ioports",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kmsg",
    "kpagecgroup",
    "kpagecount",
    "kpageflags",
    "latency_stats",
    "sched_debug",
    "slabinfo",
    "timer_list",
    "timer_stats",
    "vmallocinfo",
];

/// Folders of `/proc` of that kind.
const PROC_EMPTY: &[&str] = &["acpi", "asound", "scsi"];

/// A `/proc` of the new pid namespace, its dangerous parts closed. Tells whether the kernel limits what System V objects take.
pub(super) fn mount(setup: &Setup) -> Result<bool, StartFailure> {
    let target = inside("/proc");
    mount::mount(Some("proc"), target.as_str(), Some("proc"), NO_PROGRAMS, None::<&str>)
        .at(step::MOUNT_PROC, "/proc")?;
    // Before it becomes read-only.
    forbid_namespaces(&format!("{target}/sys/user"))?;
    rlimits::share_notices(&format!("{target}/sys/fs/inotify"), &format!("{target}/sys/user"));
    let ipc_is_limited = ipc::limit(&format!("{target}/sys/kernel"), setup.tmp_bytes);
    for name in PROC_READ_ONLY {
        let path = PathBuf::from(format!("{target}/{name}"));
        if path.exists() {
            bind_mount(&path, &path)?;
            sys::seal_mount(&path, Seal::Files).at("make read-only", name)?;
        }
    }
    let null = format!("{HOST}/dev/null");
    for name in PROC_HIDDEN {
        let path = PathBuf::from(format!("{target}/{name}"));
        if path.exists() {
            bind_mount(Path::new(&null), &path)?;
        }
    }
    for name in PROC_EMPTY {
        let path = format!("{target}/{name}");
        if Path::new(&path).exists() {
            tmpfs(&path, 4096, 0o555, NO_PROGRAMS | MsFlags::MS_RDONLY)?;
        }
    }
    Ok(ipc_is_limited)
}

/// Forbids further namespaces, through this user namespace's own settings in `folder`.
///
/// In a user namespace of its own a task would have every capability again, and with them most of the kernel to try.
fn forbid_namespaces(folder: &str) -> Result<(), StartFailure> {
    for entry in fs::read_dir(folder).at("forbid namespaces", folder)? {
        let entry = entry.at("forbid namespaces", folder)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("max_") && name.ends_with("_namespaces") {
            fs::write(entry.path(), "0").at("forbid namespaces", &name)?;
        }
    }
    Ok(())
}
